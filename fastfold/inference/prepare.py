"""Prepare a request: check it, open its networks, and read its targets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from fastfold.data.search.settings import PUBLIC_SERVER_TERMS
from fastfold.data.targets import Target, number_targets
from fastfold.data.templates.source import TemplateFinder, open_templates
from fastfold.errors import ConfigError, InputError, TargetError
from fastfold.evoformer.precision import about_missing_units, choose_precision
from fastfold.inference.config import DEFAULT_SEEDS, InferConfig
from fastfold.inference.models import (
    Network,
    about_mini,
    check_networks,
    refuse_complexes,
    refuse_untrained,
    refuse_without_atoms,
    requested_networks,
    target_cost,
    untrained_networks,
)
from fastfold.inference.output.references import find_reference
from fastfold.inference.planning.cuda_graph import check_cuda_graphs
from fastfold.inference.relax.config import check_installed
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.kernels.common.backend import VARIABLE
from fastfold.protein.io.observed import COMPARISON, read_observed

WITHOUT_ALIGNMENT = (
    "no alignments given: folding from the sequence alone. An alignment makes most predictions far better: `msa_dir` "
    f"DIR takes existing ones, `SearchSources.databases=FASTA` searches on this machine, and {PUBLIC_SERVER_TERMS}"
)


@dataclass
class InferJob:
    """Checked request with its networks and targets."""

    request: InferRequest  #: The request
    networks: list[Network]  #: Networks of the run
    targets: list[Target]  #: Targets to fold, in order
    errors: list[InputError]  #: Errors of the other targets
    finder: TemplateFinder | None  #: Finder of templates; None if none are requested
    #: Lines about a slow precision, weights that are left out, and networks that suit no complexes
    warnings: list[str]
    notes: list[str]  #: Lines about limits of the predictions, and about the precision

    @property
    def costs(self) -> list[float]:
        """Cost of each target, see :func:`~fastfold.inference.models.target_cost`."""
        return [target_cost(target, self.networks, self.request.config) for target in self.targets]


def prepare(
    request: InferRequest,
    device: torch.device | None,
    networks: Sequence[Network] | None = None,
    *,
    is_screen: bool = False,
) -> InferJob:
    """Check a request, open its networks unless they are given, and read its targets, or raise FastFoldError.

    The device is None for folds on a cluster, whose devices may differ. ``is_screen`` refuses networks whose complexes
    say nothing about partners. The job has the precision of the device.
    """
    config, chosen = with_precision(request.config, device)
    request, options = replace(request, config=config), request.options
    if device is not None:
        check_cuda_graphs(bool(config.cuda_graphs), device)
        if device.type == "mps" and config.parallel is not None:
            raise ConfigError(
                "`parallel` needs CUDA devices or CPUs, and the device is mps: leave out one of them"
            )
    check_request(config, options)
    left_out: list[str] = []
    if networks is None:
        skip = left_out.append if options.skip_bad_weights else None
        networks = requested_networks(request.weights, options.num_models, skip=skip)
    notes = [] if request.weights else [about_mini(networks[0])]
    check_networks(networks, config, options.templates)
    finder = open_templates(options.templates)
    targets, errors = request.read_targets()
    if is_screen:
        refuse_untrained(networks, targets)
    elif not request.weights:
        targets, refused = refuse_complexes(targets)
        errors = [*errors, *refused]
    slow = "" if device is None else about_missing_units(config.precision or "fp32", device)
    warnings = [slow] if slow else []
    warnings += [f"warning: left out: {message}" for message in left_out]
    warnings += [
        f"warning: {name} was trained on single chains only: complexes get no interface scores"
        for name in untrained_networks(networks, targets)
    ]
    if config.embed is None:
        targets, refused = refuse_without_atoms(targets)
        errors = [*errors, *refused]
    targets = [choose_seeds(target, request) for target in targets]
    if config.restraints is not None:
        targets, refused = _with_restraints(config.restraints, targets)
        errors = [*errors, *refused]
    if options.name_prefix is not None:
        targets = number_targets(targets, options.name_prefix)
    if options.sort == "length":
        targets = sorted(targets, key=lambda target: target.num_residues)
    searches = options.msa_dir is not None or options.sources.wanted
    if not searches and any(not target.has_all_alignments for target in targets):
        notes.append(WITHOUT_ALIGNMENT)
    notes += [chosen] if chosen else []
    return InferJob(request, list(networks), targets, errors, finder, warnings, notes)


def choose_seeds(target: Target, request: InferRequest) -> Target:
    """Return a target without the seeds of its input, and with a warning, if the request has others."""
    config = request.config
    has_others = request.has_seeds or config.seeds != DEFAULT_SEEDS
    takes_one = config.embed is not None and config.embed.file_format == "bioemu" and len(target.seeds) > 1
    if not target.seeds or not (has_others or takes_one):
        return target
    theirs, ours = (", ".join(map(str, seeds)) for seeds in (target.seeds, config.seeds))
    doubt = f"the seeds of the input ({theirs}) are not used, but those of the command ({ours})"
    return replace(target, seeds=(), warnings=(*target.warnings, doubt))


def _with_restraints(path: Path, targets: Sequence[Target]) -> tuple[list[Target], list[InputError]]:
    """Return targets that a file of restraints suits, and the error of each other one, before any search."""
    from fastfold.inference.restraints.file import read_restraints  # gradients are slow to import

    suitable: list[Target] = []
    errors: list[InputError] = []
    for target in targets:
        try:
            read_restraints(path, target)
        except InputError as error:
            errors.append(TargetError(target.name, error))
        else:
            suitable.append(target)
    return suitable, errors


def check_request(config: InferConfig, options: RunOptions) -> None:
    """Check files, folders and relaxation before the first fold, or raise FastFoldError."""
    if options.sources.wanted and config.ranks > 1:
        raise ConfigError(
            "`parallel` does not search: run fastfold search first and give its folder as `msa_dir`"
        )
    templates = options.templates
    for one in (config.initial_guess, *templates.structures, *templates.complexes, *templates.chains):
        if not isinstance(one, Path | None):
            raise ConfigError(
                f"a run into a folder reads structures from files, and {one.name!r} is an object; fold with "
                "fastfold.predict, or give its file"
            )
    if options.msa_dir is not None and not options.sources.wanted and not options.msa_dir.is_dir():
        raise InputError("no such folder; give the folder of the alignments", path=options.msa_dir)
    if options.reference is not None:
        reference = find_reference(options.reference, "")
        if reference is not None:
            read_observed(reference, COMPARISON)
    for option, path in (("`initial_guess`", config.initial_guess), ("`restraints`", config.restraints)):
        if path is not None and not path.is_file():
            raise InputError(f"no such file; check the name given with {option}", path=path)
    if config.relax != "none":
        check_installed()
        from fastfold.inference.relax.platforms import choose_platform  # OpenMM is slow to import

        choose_platform(config.relax_platform)


def with_precision(config: InferConfig, device: torch.device | None) -> tuple[InferConfig, str]:
    """Return the settings with the device's precision, and a line if it was chosen automatically, or raise ConfigError.

    Without a device, for the folds of a cluster, it is float32 by default.
    """
    if device is None:
        if config.precision == "auto":
            raise ConfigError(
                "the machines of a cluster may differ: set the precision (`precision`) instead of auto"
            )
        return replace(config, precision=config.precision or "fp32"), ""
    name = config.precision or ("auto" if device.type == "cuda" else "fp32")
    precision, reason = choose_precision(name, device)
    if config.ranks > 1 and precision not in ("fp32", "bf16"):
        raise ConfigError(
            f"several processes fold in fp32 or bf16, not in {precision}; choose one with `precision`"
        )
    line = f"precision {precision}: {reason}" if name == "auto" else ""
    return replace(config, precision=precision), line


def about_device(device: torch.device) -> str:
    """Return a line about a device on which operators run otherwise than on NVIDIA's GPUs and CPUs; empty for those."""
    if device.type == "mps":
        return (
            "mps: operators run in PyTorch, and on the CPU where Metal lacks them or float64; `cuda_graphs` and "
            "`parallel` are refused; not tested on an Apple GPU"
        )
    if device.type == "cuda" and torch.version.hip is not None:
        kernels = f"in Triton's kernels with {VARIABLE}=triton"
        return f"ROCm {torch.version.hip}: operators run in PyTorch, or {kernels}; not tested on ROCm"
    return ""


def about_kernels(device: torch.device) -> str:
    """Return a line about kernels that the first fold on a GPU compiles; empty if they are compiled."""
    if device.type != "cuda" or os.environ.get(VARIABLE) == "torch" or find_spec("triton") is None:
        return ""
    if torch.version.hip is not None and os.environ.get(VARIABLE) != "triton":
        return ""
    from triton import knobs

    if any(Path(knobs.cache.dir).glob("*")):
        return ""
    return f"the first fold compiles about 30 kernels for this GPU, which are kept in {knobs.cache.dir}"
