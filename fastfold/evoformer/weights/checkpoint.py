"""Loading, saving and converting weights: AlphaFold's ``.npz``, OpenFold's ``.pt``, FastFold's ``.safetensors``.

Names and shapes of a file are compared with those of the network before any data are read. Files are written under a
temporary name and then renamed.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from ml_collections import ConfigDict
from torch import Tensor, nn

from fastfold.errors import OutputError, WeightsError, printable
from fastfold.evoformer.config import is_multimer
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.alphafold_file import NpzParameters
from fastfold.evoformer.weights.infer_config import has_ptm, has_templates, infer_config, preset_of
from fastfold.evoformer.weights.mapping import (
    WeightSource,
    check_parameters,
    own_mappings,
    read_parameters,
    refuse_not_finite,
    write_parameters,
)
from fastfold.evoformer.weights.names import PREFIX, alphafold_mappings
from fastfold.evoformer.weights.openfold_file import OpenFoldParameters, is_openfold, openfold_parameters
from fastfold.evoformer.weights.safetensors_file import OwnFile, write_own
from fastfold.evoformer.weights.state_dict_file import OwnParameters, infer_own_config, is_own
from fastfold.evoformer.weights.untrusted import READABLE, Format, file_format, open_archive, read_torch
from fastfold.utils.atomic_files import replacing

Kind = Literal["alphafold", "openfold", "fastfold", "state dict"]

_KINDS: dict[Kind, str] = {
    "alphafold": "official AlphaFold parameters (.npz)",
    "openfold": "OpenFold checkpoint (.pt)",
    "fastfold": "FastFold weights (.safetensors)",
    "state dict": "FastFold state dict without a configuration",
}


@dataclass(frozen=True)
class WeightsInfo:
    """Description of a weights file."""

    path: Path  #: The file
    kind: Kind  #: Program that defines its format
    #: The network, whose parameters are on the meta device until they are loaded
    model: AlphaFold = field(repr=False, compare=False)
    dtype: str  #: Element types in the file; in memory they are float32
    #: Official name of its network, None for other configurations. Some official networks have equal shapes: the
    #: file's name decides between them, or else the first one is returned.
    preset: str | None
    #: Further entries of the file's header, such as the training data
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> ConfigDict:
        """The network's configuration."""
        return self.model.config

    @property
    def multimer(self) -> bool:
        """True for the multimer network."""
        return is_multimer(self.config)

    @property
    def has_templates(self) -> bool:
        """True if the network uses templates."""
        return has_templates(self.config)

    @property
    def has_ptm(self) -> bool:
        """True if the network predicts aligned errors, and so pTM."""
        return has_ptm(self.config)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(value.numel() for value in self.model.state_dict().values())

    def describe(self) -> str:
        """Return the description as a few lines of text."""
        trunk, heads = self.config.model.embeddings_and_evoformer, self.config.model.heads
        parts = [
            "multimer" if self.multimer else "monomer",
            "templates" if self.has_templates else "no templates",
            "predicted aligned error and pTM" if self.has_ptm else "no predicted aligned error",
        ]
        sizes = [
            f"{trunk.evoformer_num_block} Evoformer blocks",
            f"{trunk.extra_msa_stack_num_block} extra MSA blocks",
            f"{heads.structure_module.num_layer} structure iterations",
            f"{self.config.model.num_recycle} recycles",
        ]
        channels = [
            f"MSA {trunk.msa_channel}",
            f"extra MSA {trunk.extra_msa_channel}",
            f"pair {trunk.pair_channel}",
            f"single {trunk.seq_channel}",
        ]
        lines = {
            "file": str(self.path),
            "format": _KINDS[self.kind],
            "model": self.preset or "not an official one",
            "network": ", ".join(parts),
            "size": ", ".join(sizes),
            "channels": ", ".join(channels),
            "parameters": f"{self.parameters:,} ({self.dtype})",
        }
        lines |= {_one_line(name.replace("_", " ")): _one_line(text) for name, text in self.notes.items()}
        return "\n".join(f"{name:<11} {value}" for name, value in lines.items())


def _one_line(text: str) -> str:
    """Return the first 200 characters of an untrusted text, unprintable ones as blanks."""
    return printable(text[:200])


AnyPath = str | os.PathLike[str]
_FORMATS: dict[Format, Kind] = {"npz": "alphafold", "torch": "openfold", "safetensors": "fastfold"}


def weights_info(path: AnyPath) -> WeightsInfo:
    """Return a description of a weights file as :func:`read_weights`, without reading data.

    Names and shapes are checked.
    """
    with _open(Path(path), None) as (info, _):
        return info


def read_weights(
    path: AnyPath, *, config: Mapping[str, Any] | None = None
) -> tuple[WeightsInfo, dict[str, Tensor]]:
    """Read any weights file: its description, and the network's state dict in float32.

    Args:
        path: ``params_model_*.npz``, OpenFold's ``.pt`` or FastFold's ``.safetensors``; recognised by content.
        config: The network's configuration; None to read or infer it from the file.

    Raises:
        WeightsError: The file is missing, damaged, unsafe, or made for another network.
    """
    with _open(Path(path), config) as (info, read):
        return info, read()


def load_model(
    path: AnyPath, *, config: Mapping[str, Any] | None = None, model: AlphaFold | None = None
) -> AlphaFold:
    """Load the network of a weights file, in float32 on the CPU and in evaluation mode.

    Args:
        path: As :func:`read_weights`.
        config: As :func:`read_weights`.
        model: The network of :func:`weights_info`, which gets the parameters; None to build one.

    Raises:
        WeightsError: As :func:`read_weights`.
    """
    with _open(Path(path), config, model) as (info, read):
        info.model.load_state_dict(read(), assign=True)
        return info.model.eval()


def save_weights(
    path: AnyPath,
    model_or_state: nn.Module | Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    preset: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write weights in FastFold's format, atomically: ``path`` always holds the old or the whole new file.

    The path ends in ``.safetensors``. Element types are kept; ``metadata`` are further entries of the header.

    Raises:
        WeightsError: The parameters do not match the configuration, or hold NaN or infinite values.
        OutputError: The file cannot be written.
    """
    path = Path(path)
    _check_ending(path, (".safetensors",))
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    check_parameters(own_mappings(_network(config, str(path))), WeightSource(str(path), shapes))
    for name, value in state.items():
        refuse_not_finite(f"{path} (not written)", name, value.detach().cpu().float().numpy())
    with _replacing(path) as temporary:
        write_own(temporary, state, config, preset=preset, metadata=metadata or {})


def convert(
    path_in: AnyPath,
    path_out: AnyPath,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> WeightsInfo:
    """Write the weights of one file in another format, and return the new file's description.

    Args:
        path_in: As :func:`read_weights`.
        path_out: ``.safetensors`` (FastFold), ``.npz`` (official layout) or ``.pt`` (OpenFold's names, version 2). Only
            the first holds a configuration.
        config: As :func:`read_weights`.
        dtype: Element type of the parameters: float16 or bfloat16 halve the file. ``.npz`` lacks bfloat16.

    Raises:
        WeightsError: As :func:`read_weights`; or the output would overwrite the input or has another suffix; or a
            parameter is too large for the element type.
        OutputError: The output cannot be written.
    """
    path_in, path_out = Path(path_in), Path(path_out)
    _check_output(path_out, dtype)
    with suppress(OSError, ValueError):
        if os.path.samefile(path_in, path_out):
            raise WeightsError(f"{path_out}: the output is the same file as the input; choose another name")
    info, state = read_weights(path_in, config=config)
    write_weights(path_out, state, info, dtype=dtype)
    return weights_info(path_out)


def write_weights(
    path: AnyPath, state: Mapping[str, Tensor], info: WeightsInfo, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write a state dict in the format of a file name's ending, as :func:`convert`.

    Args:
        path: As the output of :func:`convert`.
        state: Parameters of the description's network, under our names.
        info: Description of the file that the network is from.
        dtype: As :func:`convert`.

    Raises:
        WeightsError: The name has another ending, or a parameter is too large for the element type.
        OutputError: The file cannot be written.
    """
    path = Path(path)
    _check_output(path, dtype)
    state = {name: value.to(dtype) for name, value in state.items()}
    if path.suffix == ".safetensors":
        save_weights(path, state, info.config, preset=info.preset, metadata=info.notes)
        return
    for name, value in state.items():
        refuse_not_finite(f"{path} (not written)", name, value.float().numpy())
    info.model.load_state_dict(state, assign=True)
    write = _write_npz if path.suffix == ".npz" else _write_openfold
    with _replacing(path) as temporary:
        write(temporary, info.model, dtype)


@contextmanager
def _open(
    path: Path, config: Mapping[str, Any] | None, model: AlphaFold | None = None
) -> Iterator[tuple[WeightsInfo, Callable[[], dict[str, Tensor]]]]:
    """Open a file; yield its description, and a function that reads the state dict of the description's network."""
    kind, preset, stored = file_format(path), None, None
    notes: Mapping[str, str] = {}
    with ExitStack() as opened:
        source: WeightSource
        if kind == "safetensors":
            own = source = OwnFile(opened.enter_context(path.open("rb")), path)
            preset, notes, stored = own.preset if config is None else None, own.notes, own.config
        elif kind == "npz":
            source = NpzParameters(opened.enter_context(open_archive(path)), path)
        else:
            tensors, place = read_torch(path)
            notes = {"container": place} if place else {}
            if not is_own(tensors) and not is_openfold(tensors):
                raise WeightsError(
                    f"{path}: expected OpenFold's parameter names, found {next(iter(tensors))}. {READABLE}"
                )
            source = (OwnParameters if is_own(tensors) else OpenFoldParameters)(tensors, str(path))
        has_own_names = isinstance(source, OwnFile | OwnParameters)
        if model is None:
            infer = infer_own_config if has_own_names else infer_config
            if config is None:
                config = infer(source.shapes, name_hint=path.name) if stored is None else stored
            model = _network(config, source.origin)
        mappings = own_mappings(model) if has_own_names else alphafold_mappings(model)
        check_parameters(mappings, source)
        info = WeightsInfo(
            path=path,
            kind="state dict" if has_own_names and stored is None else _FORMATS[kind],
            model=model,
            dtype=source.dtype,
            preset=preset or preset_of(model.config, path.name),
            notes=notes,
        )
        yield info, partial(read_parameters, model, mappings, source)


def _network(config: Mapping[str, Any], origin: str) -> AlphaFold:
    """Build the network of a configuration on the meta device."""
    try:
        with torch.device("meta"):
            return AlphaFold(config if isinstance(config, ConfigDict) else ConfigDict(config))
    except Exception as error:  # an untrusted tree may raise any error
        raise WeightsError(
            f"{origin}: cannot build a network from the configuration ({error}); pass a complete tree with "
            "AlphaFold's keys"
        ) from None


def _check_ending(path: Path, endings: tuple[str, ...]) -> None:
    if path.suffix not in endings:
        raise WeightsError(f"{path}: expected a name that ends in {' or '.join(endings)}")


def _check_output(path: Path, dtype: torch.dtype) -> None:
    _check_ending(path, (".safetensors", ".npz", ".pt"))
    if path.suffix == ".npz" and dtype == torch.bfloat16:
        raise WeightsError(f"{path}: .npz files hold float32 or float16, not bfloat16; choose one of these")


def _write_npz(path: Path, model: AlphaFold, dtype: torch.dtype) -> None:
    """Write the official layout, stored and without dates, so that equal weights give equal files."""
    with zipfile.ZipFile(path, "w") as archive:
        for key, array in write_parameters(model, alphafold_mappings(model)):
            member = zipfile.ZipInfo(f"{PREFIX}{key}.npy")
            member.external_attr = 0o644 << 16
            with archive.open(member, "w", force_zip64=True) as file:
                array = array.astype(np.float16) if dtype == torch.float16 else array
                np.lib.format.write_array(file, array, allow_pickle=False)


def _write_openfold(path: Path, model: AlphaFold, dtype: torch.dtype) -> None:
    """Write OpenFold's state dict. Equal weights give equal files."""
    state = {name: torch.from_numpy(array).to(dtype) for name, array in openfold_parameters(model)}
    with path.open("wb") as file:
        torch.save(state, file)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path as :func:`fastfold.utils.atomic_files.replacing`; convert PyTorch's errors."""
    with replacing(path) as temporary:
        try:
            yield temporary
        except RuntimeError as error:  # from torch.save
            raise OutputError(
                f"cannot write {str(path)!r}: {error}; free some space or choose another folder"
            ) from error
