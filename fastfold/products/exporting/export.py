"""``export``: programs of PyTorch's operators that compute passes of a network."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastfold._version import __version__
from fastfold.errors import ConfigError, InputError, first_line
from fastfold.evoformer.embedders.input import SequenceConvolution
from fastfold.evoformer.execution import CallSettings, ExecutionPolicy, calling, policies_of
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import precision_of
from fastfold.inference.config import InferConfig
from fastfold.inference.network_settings import max_rows, recycle_tolerance
from fastfold.kernels.decompositions import decompositions
from fastfold.products.exporting.foreign_program import ABOUT, check_program
from fastfold.products.exporting.network_pass import (
    LengthClass,
    NetworkPass,
    Tensors,
    UnrolledPasses,
    first_previous,
    pad_features,
    read_features,
)
from fastfold.utils.atomic_files import prepare_output_directory, replacing
from fastfold.utils.foreign_text import parse_json

# Of programs, and of packages of AOTInductor.
_ENDINGS = {False: ".pt2", True: ".aoti.pt2"}
_COMPILERS = ("g++", "clang++", "c++")


@dataclass(frozen=True)
class ExportedNetwork:
    """Exported program of one length class."""

    path: Path  #: The file
    shape: LengthClass  #: Sizes of its inputs; shorter targets are padded
    num_recycles: int | None  #: Passes after the first within the program; None for a program of one pass
    package: bool  #: True for a package compiled by AOTInductor
    run: Any  #: The program itself
    names: tuple[str, ...]  #: Features that it reads
    sizes: Mapping[str, Sequence[int]]  #: Sizes of the recycled tensors
    #: True for networks with a convolution over residues, which padding would change
    has_exact_length: bool
    #: Features that the network reads where a target has them, and the program does not
    unread: tuple[str, ...] = ()

    def __call__(self, features: Tensors | Sequence[Tensors], previous: Tensors | None = None) -> Tensors:
        """Run the program, and return the outputs of :class:`.NetworkPass` for the residues of the target.

        Args:
            features: Features of one pass, :meth:`fastfold.data.features.pipeline.FeatureSampler.sample` as tensors; of
                an unrolled program, those of every pass. Features that it does not read are ignored.
            previous: Outputs of the previous pass; None for the first, and for an unrolled program.

        Raises:
            InputError: The target exceeds the class, features are missing, or the program does not read one.
        """
        passes = [features] if isinstance(features, Mapping) else list(features)
        expected = 1 + (self.num_recycles or 0)
        if len(passes) != expected:
            raise InputError(f"expected the features of {expected} passes, found {len(passes)}")
        for one in passes:
            if unread := sorted(set(self.unread) & set(one)):
                raise InputError(
                    f"the program does not read the feature {unread[0]}, which the network does; leave it out, or use "
                    "the network"
                )
            if missing := sorted(set(self.names) - set(one)):
                raise InputError(f"the program reads the feature {missing[0]}, which is missing")
        residues = int(passes[0]["aatype"].shape[-1])
        if self.has_exact_length and residues != self.shape.residues:
            raise InputError(
                f"the network mixes neighbouring residues, so its program takes exactly {self.shape.residues} "
                f"residues, found {residues}; export this length"
            )
        try:
            padded = [pad_features({name: one[name] for name in self.names}, self.shape) for one in passes]
        except ValueError as error:
            raise InputError(f"{error}; export a larger class") from None
        tensors: tuple[Tensors, ...]
        if self.num_recycles is None:
            tensors = (padded[0], self._padded(previous))
        else:
            tensors = ({name: torch.stack([one[name] for one in padded]) for name in self.names},)
        with torch.inference_mode():
            outputs: Tensors = self.run(*tensors)
        pairs, n = ("prev_pair", "pae"), residues  # without padding
        return {name: value[:n, :n] if name in pairs else value[:n] for name, value in outputs.items()}

    def _padded(self, previous: Tensors | None) -> Tensors:
        """Return the padded results of the previous pass; zeros for the first."""
        padded = {name: torch.zeros(list(size)) for name, size in self.sizes.items()}
        for name, value in padded.items() if previous is not None else ():
            own = previous[name]  # type: ignore[index]
            where = (slice(len(own)), slice(len(own))) if name == "prev_pair" else (slice(len(own)),)
            value[where] = own
        return padded


def export(
    model: AlphaFold,
    directory: str | Path,
    *,
    residues: int | Sequence[int],
    max_msa: tuple[int, int] | None = None,
    templates: int | None = None,
    num_recycles: int | None = None,
    package: bool = False,
) -> list[ExportedNetwork]:
    """Export a network for some lengths, as programs of PyTorch's operators.

    A program is a file of :func:`torch.export.save`, or with ``package`` a compiled package of AOTInductor for CPUs.
    Neither needs FastFold to run. Kernels of FastFold are replaced by their definitions, so programs need the memory
    and time of those.

    Args:
        model: Network from :func:`fastfold.load_model`, on the CPU.
        directory: Output folder; created if missing.
        residues: Lengths, each a program, in the order of the result; shorter targets are padded.
        max_msa: Rows of MSA and extra MSA; None for the network's own.
        templates: Number of templates; None for the network's own, 0 for none.
        num_recycles: Unroll this many passes after the first in one program; None for one pass, with recycling outside.
        package: Compile each program with AOTInductor, which needs a C++ compiler.

    Raises:
        ConfigError: The network cannot be exported, or a setting is invalid; says why.
        OutputError: A file cannot be written.

    Example:
        >>> import fastfold
        >>> model = fastfold.load_model("mini", device="cpu")
        >>> (program,) = fastfold.export(model, "programs", residues=32)  # doctest: +SKIP
        >>> program.path  # doctest: +SKIP
        PosixPath('programs/mini_32_residues_pass.pt2')

        Settings that do not match the network are refused before the work begins:

        >>> fastfold.export(model, "programs", residues=32, templates=4)
        Traceback (most recent call last):
            ...
        fastfold.errors.ConfigError: templates must be 0 to 0 for mini, found 4
    """
    lengths = list(residues) if isinstance(residues, Iterable) else [residues]
    if not lengths or any(
        isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1 for n in lengths
    ):
        raise ConfigError(f"residues must be whole numbers from 1, found {residues!r}")
    _check(model, num_recycles, package)
    rows = InferConfig(max_msa=max_msa).max_msa or max_rows(model.config)
    most = _own_templates(model)
    least = 1 if model.multimer and most else 0
    shown = most if templates is None else templates
    if not isinstance(shown, int) or not least <= shown <= most:
        raise ConfigError(f"templates must be {least} to {most} for {model.name}, found {templates!r}")
    folder = prepare_output_directory(directory)
    shapes = [LengthClass(int(n), *rows, shown) for n in lengths]
    return [_export_class(model, folder, shape, num_recycles, package) for shape in shapes]


def load_exported(path: str | Path, *, trusted: bool = False) -> ExportedNetwork:
    """Load a program that :func:`export` wrote.

    Args:
        path: The file. A program of ``torch.export`` is checked before PyTorch reads it, and runs no foreign code.
        trusted: Load a package of AOTInductor (``.aoti.pt2``), which is a compiled library and can do anything that a
            program can.

    Raises:
        InputError: The file is not such a program, or a package without ``trusted``.

    Example:
        >>> import fastfold
        >>> program = fastfold.load_exported("programs/mini_32_residues_pass.pt2")  # doctest: +SKIP
        >>> program(features)["prev_pos"].shape  # doctest: +SKIP
        torch.Size([32, 37, 3])

        Other files are refused:

        >>> fastfold.load_exported("weights.pt")
        Traceback (most recent call last):
            ...
        fastfold.errors.InputError: weights.pt: no such file; check the name
    """
    path = Path(path)
    package = path.name.endswith(_ENDINGS[True])
    if not path.is_file():
        raise InputError("no such file; check the name", path=path)
    if package and not trusted:
        raise InputError(
            "is a compiled library, which can run any code; pass trusted=True if you trust its source",
            path=path,
        )
    if not package:
        check_program(path)
    try:
        if package:
            with zipfile.ZipFile(path) as archive:  # PyTorch would print a traceback about other files
                if not any("/aotinductor/" in name for name in archive.namelist()):
                    raise ValueError("it has no entry /aotinductor/")
            call: Any = torch._inductor.aoti_load_package(str(path))
            about = parse_json(call.get_metadata()["fastfold"], path)
        else:
            extra = {ABOUT: ""}
            program = torch.export.load(path, extra_files=extra)
            about = parse_json(extra[ABOUT], path)
            call = program.module()
    except Exception as error:  # the type differs between versions of PyTorch
        raise InputError(f"is not a program of fastfold.export: {first_line(error)}", path=path) from None
    return ExportedNetwork(
        path,
        LengthClass(**about["shape"]),
        about["num_recycles"],
        package=package,
        run=call,
        names=tuple(about["features"]),
        sizes=about["previous"],
        has_exact_length=about["has_exact_length"],
        unread=tuple(about["unread"]),
    )


def _check(model: AlphaFold, num_recycles: int | None, package: bool) -> None:
    if not isinstance(model, AlphaFold):
        raise ConfigError(f"model must be a network of fastfold.load_model, found {type(model).__name__}")
    if type(model) is not AlphaFold:
        raise ConfigError(
            "a network that is divided between processes cannot be exported; load it in one process"
        )
    if precision_of(model) not in ("fp32", "bf16"):
        raise ConfigError(
            f"a network in {precision_of(model)} cannot be exported, because its products are not PyTorch's; load it "
            "with precision='fp32' or 'bf16'"
        )
    if next(model.parameters()).device.type != "cpu":
        raise ConfigError("a network on a GPU cannot be exported yet; load it with device='cpu'")
    if num_recycles is not None:
        if isinstance(num_recycles, bool) or not isinstance(num_recycles, int) or num_recycles < 0:
            raise ConfigError(f"num_recycles must be a whole number from 0, found {num_recycles!r}")
        if model.config.model.heads.structure_module.get("distogram_descent") is not None:
            raise ConfigError(
                f"{model.name} moves residues after its last pass, which a program cannot: export one pass "
                "(num_recycles=None), or set model.config.model.heads.structure_module.distogram_descent = None"
            )
    compiler = os.environ.get("CXX")
    if package and not any(map(shutil.which, _COMPILERS if compiler is None else shlex.split(compiler)[:1])):
        raise ConfigError(
            "a package of AOTInductor needs a C++ compiler, g++ for example; install it, or package=False"
        )


def _export_class(
    model: AlphaFold, folder: Path, shape: LengthClass, num_recycles: int | None, package: bool
) -> ExportedNetwork:
    try:
        # Operators whole in the graph are those that record gradients; others are loops over blocks.
        with torch.enable_grad(), calling(CallSettings(policies_of(model, ExecutionPolicy()))):
            features, unread = read_features(model, shape)
            previous = first_previous(model, shape.residues)
            module: nn.Module = NetworkPass(model)
            arguments: tuple[Tensors, ...] = (features, previous)
            if num_recycles is not None:
                module = UnrolledPasses(model, num_recycles, recycle_tolerance(model.config))
                arguments = ({k: torch.stack([v] * (num_recycles + 1)) for k, v in features.items()},)
            program = torch.export.export(module, arguments, strict=False)
        with torch.no_grad():
            program = program.run_decompositions(decompositions())
    except Exception as error:  # the type differs between versions of PyTorch
        raise ConfigError(f"{model.name} cannot be exported: {first_line(error)[:300]}") from error
    about = {
        "model": model.name,
        "fastfold_version": __version__,
        "shape": asdict(shape),
        "num_recycles": num_recycles,
        "features": sorted(features),
        "unread": unread,
        "has_exact_length": any(isinstance(part, SequenceConvolution) for part in model.modules()),
        "previous": {name: list(value.shape) for name, value in previous.items()},
    }
    kind = "pass" if num_recycles is None else f"{num_recycles}_recycles"
    path = folder / f"{model.name}_{shape.residues}_residues_{kind}{_ENDINGS[package]}"
    if package:
        _write_package(program, path, about)
    else:
        with replacing(path) as temporary, temporary.open("wb") as file:
            torch.export.save(program, file, extra_files={ABOUT: json.dumps(about)})
    return load_exported(path, trusted=True)


def _write_package(program: Any, path: Path, about: Mapping[str, Any]) -> None:
    options = {"aot_inductor.metadata": {"fastfold": json.dumps(about)}}
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "program.pt2"
        try:
            with torch.no_grad():
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(made), inductor_configs=options
                )
        except Exception as error:  # the type differs between versions of PyTorch
            raise ConfigError(
                f"AOTInductor cannot compile {about['model']}: {first_line(error)[:300]}; use package=False"
            ) from error
        with replacing(path) as temporary:
            shutil.copyfile(made, temporary)


def _own_templates(model: AlphaFold) -> int:
    """Return the number of templates that a network takes; 0 for networks without."""
    if model.template_embedder is None:
        return 0
    return 4 if model.multimer else int(model.config.data.eval.max_templates)
