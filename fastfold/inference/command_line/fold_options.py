"""Options of every command that folds targets, and their conversion to a request."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.data.databases.published import find_databases
from fastfold.data.search.settings import SearchSources, ServerAccess
from fastfold.data.templates.options import TemplateOptions
from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig
from fastfold.inference.progress import print_line
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.inference.sampling.settings import Sampling
from fastfold.utils.command_line.from_fields import More, add_field_options, from_options
from fastfold.utils.option_fields import LARGEST, option, options_of

_FASTA = re.compile(r"\.(fa|faa|fas|fasta)(\.gz)?$")


@dataclass(frozen=True)
class Shortcuts:
    """Options of the command line that set several settings of a fold."""

    skip_output: str = option(
        default="",
        group="structures",
        metavar="LIST",
        is_rare=True,
        help="leave out kinds of files, joined by commas: plots, pae_json",
    )
    seed: int | None = option(
        "--seed",
        "--random-seed",
        default=None,
        bounds=(0, LARGEST),
        group="sampling",
        help="seed of everything random (default 0)",
    )
    num_seeds: int | None = option(
        default=None,
        bounds=(1, LARGEST),
        group="sampling",
        help="fold with N seeds, from --seed on (default 1)",
    )

    def seeds(self) -> tuple[int, ...] | None:
        """Return ``num_seeds`` seeds from ``seed`` on; None if both are left out."""
        if self.seed is None and self.num_seeds is None:
            return None
        first = self.seed or 0
        return tuple(range(first, first + (self.num_seeds or 1)))


def add_inputs(
    parser: Any, help: str = "FASTA, A3M or CSV files (.gz too), folders, or -", *, metavar: str = "INPUT"
) -> None:
    """Add the files of targets to a command."""
    parser.add_argument("inputs", nargs="*", type=Path, metavar=metavar, help=help)


def add_fold_options(
    parser: Any, *, structures: bool = True, parallel: bool = True, has_order: bool = False
) -> None:
    """Add the options of every command that folds targets: folders, weights, searches, sampling, output and machine.

    Args:
        parser: Parser of the command.
        structures: Add the options about predicted structures too.
        parallel: Add the option of several processes for each target.
        has_order: Add the order of the targets.
    """
    own = ["results", "weights", "networks", "alignments", "sources", "pairs", "targets"]
    own += ["order"] if has_order else []
    add_field_options(dict.fromkeys(own, parser), InferRequest, RunOptions, SearchSources, ServerAccess)
    templates, sampling = parser.add_argument_group("templates"), parser.add_argument_group("sampling")
    output, machine = parser.add_argument_group("output"), parser.add_argument_group("machine")
    groups = {"templates": templates, "sampling": sampling, "output": output}
    groups |= dict.fromkeys(("machine", "memory", "search processes"), machine)
    if structures:
        groups |= {"restraints": sampling, "structures": output, "reference": output}
    if parallel:
        groups["ranks"] = machine
    add_field_options(groups, Shortcuts, TemplateOptions, InferConfig, Sampling, RunOptions, SearchSources)


def infer_request(options: argparse.Namespace) -> InferRequest:
    """Return the request of the options of :func:`add_fold_options`, with the command's ``inputs``.

    FASTA files after ``--templates`` are inputs, because templates are structures.

    Raises:
        FastFoldError: An option is invalid, options contradict each other, or a database cannot be used.
    """
    if options.templates:
        options.inputs += [path for path in options.templates if _FASTA.search(path.name)]
        options.templates = [path for path in options.templates if not _FASTA.search(path.name)]
    misplaced = [path for path in options.weights or () if _FASTA.search(path.name)]
    if misplaced:
        raise ConfigError(
            f"{misplaced[0]}: every name after --weights is a weights file; put FASTA files first"
        )
    _check_sampling(options)
    is_served = options.templates == [] and options.template_hits is None
    shortcuts = from_options(Shortcuts, options)
    settings = _outputs_left_out(shortcuts, options.pae if shortcuts.skip_output else None)
    seeds = shortcuts.seeds()
    if seeds is not None:
        if options.seeds is not None:
            raise ConfigError("--seeds names all seeds; leave out --seed and --num-seeds")
        settings["seeds"] = seeds
    searches = found_databases(options)
    has_seeds = seeds is not None or options.seeds is not None
    more = {
        InferRequest: {"inputs": options.inputs, "has_seeds": has_seeds},
        InferConfig: settings,
        SearchSources: searches[SearchSources],
        TemplateOptions: searches[TemplateOptions] | {"server": is_served},
    }
    if options.sample is not None:
        settings["sample"] = from_options(Sampling, options)
    return from_options(InferRequest, options, more)


def found_databases(options: argparse.Namespace, *, has_templates: bool = True) -> More:
    """Return the settings of searches in the databases of ``--databases``, or raise InputError.

    There are none without that option. Templates are searched only where ``has_templates``.
    """
    if options.databases is None:
        return {SearchSources: {}, TemplateOptions: {}}
    databases = find_databases(options.databases)
    for remark in databases.remarks:
        if not options.quiet and (has_templates or "templates" not in remark):
            print_line(f"{options.databases}: {remark}")
    templates: dict[str, Any] = {}
    if has_templates and databases.template_database is not None and options.template_db is None:
        mmcif_dir = options.template_mmcif_dir or databases.mmcif_dir
        templates = {"mmcif_dir": mmcif_dir}
        if options.template_hits is None:
            templates |= {"database": databases.template_database, "is_optional": True}
    return {
        SearchSources: {"databases": (*(options.db or ()), *databases.sequences)},
        TemplateOptions: templates,
    }


def _check_sampling(options: argparse.Namespace) -> None:
    """Refuse settings of samples without a method, or of another method."""
    for field, choice in options_of(Sampling):
        if field.name == "method" or getattr(options, choice.attribute, None) is None:
            continue
        if options.sample is None:
            raise ConfigError(f"{choice.names[0]} needs a method of sampling; give one with --sample")
        method = {"fraction": "columns", "depths": "depth"}.get(field.name, options.sample)
        if options.sample != method:
            raise ConfigError(f"{choice.names[0]} is for --sample {method}; leave it out")


def _outputs_left_out(shortcuts: Shortcuts, pae: str | None) -> dict[str, Any]:
    """Return the settings of the kinds of files that ``--skip-output`` leaves out, by the value of ``--pae``."""
    skipped = {name.strip() for name in shortcuts.skip_output.split(",")} - {""}
    if "msa" in skipped:
        raise ConfigError(
            "--skip-output msa: alignments stay in the folder alignments, by which a run continues; remove it "
            "afterwards"
        )
    if unknown := sorted(skipped - {"plots", "pae_json"}):
        raise ConfigError(f"--skip-output: expected plots or pae_json, found {unknown[0]!r}")
    if "pae_json" in skipped and pae == "yes":
        raise ConfigError("--skip-output pae_json and --pae yes exclude each other; leave out one of them")
    return {field: False for field, kind in (("plots", "plots"), ("pae", "pae_json")) if kind in skipped}
