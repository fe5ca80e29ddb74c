"""Options of every command that folds targets, and their conversion to a request."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from fastfold.cli.options.alignment_sources import (
    add_source_options,
    add_worker_option,
    alignment_engines,
    find_databases_of,
    wants_server_templates,
)
from fastfold.cli.options.from_fields import add_field_options, field_values, whole_number
from fastfold.cli.options.help_all import mark_rare
from fastfold.data.templates.options import TemplateOptions
from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig, check_seeds, parse_seeds
from fastfold.inference.ensemble.settings import Sampling
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.utils.option_fields import options_of

_FASTA = re.compile(r"\.(fa|faa|fas|fasta)(\.gz)?$")


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
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--weights",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        default=[],
        help="weights files, or monomer, monomer_ptm, multimer (default: mini)",
    )
    add_field_options({"networks": parser, "alignments": parser}, RunOptions)
    add_source_options(parser)
    add_field_options({"templates": parser.add_argument_group("templates")}, TemplateOptions)
    add_field_options({"targets": parser}, RunOptions)
    sampling, output = parser.add_argument_group("sampling"), parser.add_argument_group("output")
    machine = parser.add_argument_group("machine")
    groups = {"sampling": sampling, "output": output, "machine": machine, "memory": machine}
    if structures:
        groups |= {"restraints": sampling, "structures": output, "reference": output}
        skipped = output.add_argument(
            "--skip-output",
            metavar="LIST",
            help="leave out kinds of files, joined by commas: plots, pae_json",
        )
        mark_rare(skipped)
    if parallel:
        groups["ranks"] = machine
    if has_order:
        groups["order"] = parser
    _add_seeds(sampling)
    for kind in (InferConfig, Sampling, RunOptions):
        add_field_options(groups, kind)
    add_worker_option(machine)


def _add_seeds(group: Any) -> None:
    count = whole_number(0)
    group.add_argument(
        "--seed", "--random-seed", type=count, metavar="N", help="seed of everything random (default 0)"
    )
    group.add_argument(
        "--num-seeds", type=count, metavar="N", help="fold with N seeds, from --seed on (default 1)"
    )
    group.add_argument("--seeds", metavar="LIST", help="fold with these seeds: 0-4, or 1,3,7")


def infer_request(options: argparse.Namespace) -> InferRequest:
    """Return the request of the options of :func:`add_fold_options`, with the command's ``inputs``.

    FASTA files after ``--templates`` are inputs, because templates are structures.

    Raises:
        FastFoldError: An option is invalid, options contradict each other, or a database cannot be used.
    """
    if options.templates:
        options.inputs += [path for path in options.templates if _FASTA.search(path.name)]
        options.templates = [path for path in options.templates if not _FASTA.search(path.name)]
    misplaced = [path for path in options.weights if _FASTA.search(path.name)]
    if misplaced:
        raise ConfigError(
            f"{misplaced[0]}: every name after --weights is a weights file; put FASTA files first"
        )
    find_databases_of(options)
    return InferRequest(
        options.inputs, options.out, options.weights, infer_config(options), run_options(options)
    )


def infer_config(options: argparse.Namespace) -> InferConfig:
    """Return the settings of the fold."""
    values = field_values(options, InferConfig) | _outputs_left_out(options)
    return InferConfig(**values, seeds=_seeds(options), sample=_sampling(options))


def run_options(options: argparse.Namespace) -> RunOptions:
    """Return the options of the run other than the model's."""
    values = field_values(options, RunOptions)
    if options.pair_mode is not None:
        values["pair_mode"] = options.pair_mode
    return RunOptions(**values, engines=alignment_engines(options), templates=_template_options(options))


def _template_options(options: argparse.Namespace) -> TemplateOptions:
    """Return the sources of templates."""
    server = wants_server_templates(options)
    if options.max_template_date is not None and options.template_mmcif_dir is None and not server:
        raise ConfigError(
            "--max-template-date limits hits, which need --template-mmcif-dir; structures of --templates are always "
            "used"
        )
    is_optional = getattr(options, "has_optional_templates", False)
    return TemplateOptions(**field_values(options, TemplateOptions), server=server, is_optional=is_optional)


def _seeds(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the seeds, from a list or from the first seed and their number."""
    if options.seeds is not None:
        if options.seed is not None or options.num_seeds is not None:
            raise ConfigError("--seeds names all seeds; leave out --seed and --num-seeds")
        return parse_seeds(options.seeds)
    first = options.seed or 0
    number = 1 if options.num_seeds is None else options.num_seeds
    return check_seeds(range(first, first + number))


def _sampling(options: argparse.Namespace) -> Sampling | None:
    """Return the settings of samples; None without ``--sample``."""
    given = field_values(options, Sampling)
    if "method" in given:
        for name, method in (("fraction", "columns"), ("depths", "depth")):
            if name in given and given["method"] != method:
                raise ConfigError(f"--sample-{name} is for --sample {method}; leave it out")
        return Sampling(**given)
    used = [option.names[0] for field, option in options_of(Sampling) if field.name in given]
    if used:
        raise ConfigError(f"{used[0]} needs a method of sampling; give one with --sample")
    return None


def _outputs_left_out(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the kinds of files that ``--skip-output`` leaves out."""
    skipped = {name.strip() for name in (getattr(options, "skip_output", None) or "").split(",")} - {""}
    if "msa" in skipped:
        raise ConfigError(
            "--skip-output msa: alignments stay in the folder alignments, by which a run continues; remove it "
            "afterwards"
        )
    if unknown := sorted(skipped - {"plots", "pae_json"}):
        raise ConfigError(f"--skip-output: expected plots or pae_json, found {unknown[0]!r}")
    if "pae_json" in skipped and options.pae == "yes":
        raise ConfigError("--skip-output pae_json and --pae yes exclude each other; leave out one of them")
    return {field: False for field, kind in (("plots", "plots"), ("pae", "pae_json")) if kind in skipped}
