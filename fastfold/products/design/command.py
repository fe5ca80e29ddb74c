"""``fastfold design``: sequences for a fold, a backbone, a motif or a binding site."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastfold.errors import ConfigError
from fastfold.inference.command_line.printing import announce, is_first_process
from fastfold.inference.config import InferConfig
from fastfold.products.design.bindcraft import (
    PRESETS,
    AdvancedSettings,
    check_structure,
    read_advanced,
    read_target,
)
from fastfold.products.design.command_task import TaskOptions, design_task
from fastfold.products.design.config import PROGRAM_SEQUENCES, DesignConfig
from fastfold.utils.command_line.config_file import add_config_options
from fastfold.utils.command_line.from_fields import add_field_options, field_values, from_options
from fastfold.utils.option_fields import LARGEST, option
from fastfold.utils.units import parse_number

if TYPE_CHECKING:
    from fastfold.products.design.results.redesign import Redesign

_MOST_DESIGNS = 10_000  #: Designs of --until without --num-designs
_OF_FOLDS = ("device", "precision", "memory_budget", "host_memory", "parallel", "relax", "relax_platform")
"""Settings of folds that the command takes; others have another meaning here, such as ``--num-recycles``."""

_DESIGN = """\
Design protein sequences by gradients of an AlphaFold network, as ColabDesign and BindCraft do:

  hallucinate          a fold of --length residues; --copies for oligomers, --cyclic for rings
  fixbb STRUCTURE      a sequence for the backbone of a chain; --keep residues that stay
  partial STRUCTURE    everything around a --motif, or between parts of --contigs; their structure and residues stay
  binder STRUCTURE     a chain of --length residues that binds the given ones at --hotspots; or with --redesign,
                       --contigs or --framework, one with given residues

Each seed gives one design. All designs are folded again from their sequences, with templates of a binder's given chains
alone, and DIR gets the files and the page of fastfold infer, and

  designs.fasta, designs.tsv     sequences; their table, best fold first, with figures of the folds and failed filters
  trajectories/<name>.jsonl      figures of each step; .png plots them
  trajectories/<name>.pdb        CA atoms of the steps, a model each; <name>_design.pdb is the design

The same command continues a design that was stopped.
"""

_EPILOG = """\
losses (--loss NAME=WEIGHT): con, i_con, plddt, pae, i_pae, i_ptm, exp_res, helix, rg, NC, clashes, seq_ent, with a
  given structure dgram_cce, fape, rmsd, and with --avoid, --composition and --charge those of these names.
  Defaults: hallucinate con=1 (oligomers: i_con=1), fixbb dgram_cce=1, partial dgram_cce=1 con=1, binder i_con=1
  plddt=0.1 (with --contigs or --framework also dgram_cce=1, with --redesign dgram_cce=1 alone).

examples:
  fastfold design hallucinate --length 60 --out designs
  fastfold design fixbb backbone.pdb --weights monomer_ptm --out designs --num-designs 8
  fastfold design binder target.pdb --chains A --hotspots A54,A58 --length 80 --weights multimer --out designs
  fastfold design binder complex.pdb --redesign B --keep B20-24 --weights multimer --out designs
  fastfold design binder target.pdb --framework nanobody.pdb --loops H:26-33,H:97-110=8-14 --out designs
"""


_COUNT = (1, LARGEST)
_file = partial(option, default=None, parse=Path, metavar="FILE")
_networks = partial(option, nargs="+", parse=Path, metavar="FILE")
_filters = partial(option, group="filters")
_run = partial(option, group="run")


@dataclass(frozen=True)
class DesignOptions:
    """Options of the command other than those of the task and of the optimisation."""

    out: Path = option(is_required=True, parse=Path, metavar="DIR", help="folder for the results")
    weights: Sequence[Path] = _networks(
        default=(),
        help="networks to design with: files, or monomer, monomer_ptm, multimer (default: mini, for trying it out)",
    )
    predict_weights: Sequence[Path] | None = _networks(
        default=None, help="networks that fold the designs again (default: those of --weights)"
    )
    preset: str | None = option(
        default=None,
        choices=PRESETS,
        group="programs",
        help="settings of another program, which options of the command change (default colabdesign)",
    )
    settings: Path | None = _file(
        group="programs", help="BindCraft's settings_target file: structure, chains, hotspots and lengths"
    )
    advanced: Path | None = _file(
        group="programs", help="BindCraft's settings_advanced file; implies --preset bindcraft"
    )
    predict_seeds: int = _filters(
        default=1,
        bounds=_COUNT,
        help="fold each design with N seeds by each network of --predict-weights (default 1)",
    )
    mpnn: str | None = _filters(
        default=None,
        metavar="PROGRAM",
        help="fold sequences of another program for the designed backbones as well: proteinmpnn, ligandmpnn, or a "
        "command with {pdb} and {out}, in quotes (docs/design.md)",
    )
    mpnn_sequences: int = _filters(
        default=PROGRAM_SEQUENCES,
        bounds=_COUNT,
        help=f"sequences of --mpnn for a backbone (default {PROGRAM_SEQUENCES})",
    )
    mpnn_temperature: float = _filters(
        default=0.1,
        parse=parse_number,
        metavar="X",
        help="temperature of the sequences of --mpnn (default 0.1)",
    )
    mpnn_omit: str = _filters(
        default="", metavar="LETTERS", help="residues that --mpnn never uses, besides --forbid"
    )
    mpnn_soluble: bool = _filters(
        default=False, help="weights of --mpnn that were trained on soluble proteins"
    )
    mpnn_keep_interface: bool = _filters(
        default=False, help="residues within 4 Å of other chains stay as designed"
    )
    filters: Path | None = _file(
        group="filters",
        help="thresholds in YAML or JSON, named as BindCraft's: Average_pLDDT: {threshold: 0.8, higher: true}",
    )
    condition: str | None = _filters(
        "--where",
        default=None,
        metavar="CONDITION",
        help='condition on columns of designs.tsv that designs have to meet, such as "iptm>0.6 and rmsd<2"',
    )
    num_designs: int | None = _run(
        "--num-designs",
        "--num-seeds",
        default=None,
        bounds=_COUNT,
        help=f"designs, of seeds from --seed on (default 1; with --until at most {_MOST_DESIGNS:,})",
    )
    until: int | None = _run(
        default=None,
        bounds=_COUNT,
        help="fold designs one by one until N sequences pass --filters and --where; several processes may run the same "
        "command in one folder",
    )
    seed: int = _run(default=0, bounds=(0, LARGEST), help="first seed (default 0)")
    precision: str = _run(default="fp32", metavar="NAME", help="fp32 (default) or bf16")
    overwrite: bool = option(default=False, group="overwrite", help="start again where settings differ")


def add_design_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    parser = commands.add_parser(
        "design",
        help="design proteins by gradients of the network",
        usage="fastfold design hallucinate --length N --out DIR [options]\n"
        "       fastfold design fixbb|partial|binder STRUCTURE --out DIR [options]",
        description=_DESIGN,
        epilog=_EPILOG,
    )
    add_field_options({"": parser}, TaskOptions, DesignOptions)
    add_field_options({"task": parser.add_argument_group("task")}, TaskOptions)
    add_field_options({"programs": parser.add_argument_group("as in other programs")}, DesignOptions)
    add_field_options({"": parser.add_argument_group("optimisation")}, DesignConfig)
    add_field_options({"filters": parser.add_argument_group("sequences and filters")}, DesignOptions)
    run = parser.add_argument_group("run")
    of_folds = dict.fromkeys(("machine", "memory", "ranks", "structures"), run)
    add_field_options({"run": run}, DesignOptions)
    add_field_options(of_folds, InferConfig, only=_OF_FOLDS)
    add_field_options({"overwrite": run}, DesignOptions)
    add_config_options(parser)
    parser.set_defaults(run=run_design, quiet=False)


def run_design(namespace: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    announce(namespace)
    from fastfold.inference.setting_values import check_seeds
    from fastfold.products.design.run import TABLE, DesignRequest, run_designs

    def say(line: str) -> None:
        print(line, flush=True)

    options, task = from_options(DesignOptions, namespace), from_options(TaskOptions, namespace)
    advanced = None
    if options.settings is not None or options.advanced is not None or options.preset == "bindcraft":
        options, task, advanced = _fill_by_bindcraft(options, task, say)
        if options.mpnn is not None:
            options = _fill_program(options, advanced, namespace)
    make, config = design_task(task), _design_config(namespace, advanced)
    if options.precision not in ("fp32", "bf16"):
        raise ConfigError(f"--precision: expected fp32 or bf16, found {options.precision!r}")
    count = options.num_designs or (1 if options.until is None else _MOST_DESIGNS)
    request = DesignRequest(
        make,
        options.out,
        options.weights,
        config,
        seeds=check_seeds(range(options.seed, options.seed + count)),
        predict=options.predict_weights,
        infer=InferConfig(
            **field_values(namespace, InferConfig, only=_OF_FOLDS),
            seeds=tuple(range(options.predict_seeds)),
            num_recycles=None if advanced is None else advanced.fold_recycles,
        ),
        filters=options.filters,
        condition=options.condition,
        until=options.until,
        redesign=_redesign(options, config.forbid),
        overwrite=options.overwrite,
    )
    designs = run_designs(request, say=say)
    if not is_first_process():
        return 0
    page = options.out / "report.html"
    opened = f" Open {page}" if page.exists() else ""
    print(f"{len(designs)} designed. Table: {options.out / TABLE}.{opened}", flush=True)
    return 0


def _fill_by_bindcraft(
    options: DesignOptions, task: TaskOptions, say: Callable[[str], None]
) -> tuple[DesignOptions, TaskOptions, AdvancedSettings]:
    """Read BindCraft's files; return the options, with the files' values for those that the command lacks."""
    if task.protocol != "binder":
        raise ConfigError(f"BindCraft designs binders: its settings do not belong to {task.protocol}")
    if options.preset == "colabdesign":
        raise ConfigError("--preset colabdesign excludes --settings and --advanced; leave out one of them")
    if options.settings is not None:
        target = read_target(options.settings, say)
        task = replace(
            task,
            structure=task.structure or target.structure,
            chains=task.chains or target.chains,
            hotspots=task.hotspots or target.hotspots,
            length=task.length or target.length,
        )
        if (task.structure, task.chains, task.hotspots) == (target.structure, target.chains, target.hotspots):
            check_structure(target, options.settings)
        if options.filters is not None:
            options = replace(options, until=options.until or target.until)
    advanced = (
        AdvancedSettings()
        if options.advanced is None
        else read_advanced(options.advanced, say, has_program=options.mpnn is not None)
    )
    if task.flexible == "none":
        task = replace(task, flexible=advanced.flexible)
    return options, task, advanced


def _fill_program(
    options: DesignOptions, advanced: AdvancedSettings, namespace: argparse.Namespace
) -> DesignOptions:
    """Return the options with BindCraft's settings of MPNN for those that the command lacks."""
    from fastfold.products.design.results.program import PROGRAMS

    values = advanced.program(has_weights=options.mpnn in PROGRAMS)
    return replace(options, **(values | field_values(namespace, DesignOptions, only=tuple(values))))


def _design_config(options: argparse.Namespace, advanced: AdvancedSettings | None) -> DesignConfig:
    """Return the settings of the command, and those of BindCraft that it does not change."""
    if advanced is None:
        return from_options(DesignConfig, options)
    values = advanced.design()
    changed = field_values(options, DesignConfig)
    if "mutation_steps" in changed:
        values["tries_percent"] = 0.0
    if "weights" in changed:
        changed["weights"] = {**values["weights"], **DesignConfig(weights=changed["weights"]).weights}
    return DesignConfig(**(values | changed))


def _redesign(options: DesignOptions, forbid: str) -> Redesign | None:
    from fastfold.products.design import Redesign, SequenceProgram

    if options.mpnn is None:
        for name in ("mpnn_keep_interface", "mpnn_soluble", "mpnn_omit"):
            if getattr(options, name):
                raise ConfigError(f"--{name.replace('_', '-')} belongs to --mpnn, which is missing")
        return None
    program = SequenceProgram(
        options.mpnn,
        options.mpnn_sequences,
        forbid + options.mpnn_omit,
        temperature=options.mpnn_temperature,
        is_soluble=options.mpnn_soluble,
    )
    return Redesign(program, options.mpnn_keep_interface)
