"""``fastfold design``: sequences for a fold, a backbone, a motif or a binding site."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastfold.errors import ConfigError
from fastfold.inference.command_line.printing import announce, is_first_process
from fastfold.inference.config import InferConfig
from fastfold.products.design.bindcraft import PRESETS, AdvancedSettings, read_advanced, read_target
from fastfold.products.design.command_task import PROTOCOLS, add_task_options, design_task
from fastfold.products.design.config import PROGRAM_SEQUENCES, DesignConfig
from fastfold.utils.command_line.config_file import add_config_options
from fastfold.utils.command_line.from_fields import (
    add_field_options,
    field_values,
    from_options,
    whole_number,
)

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
    parser.add_argument("protocol", choices=PROTOCOLS, help="what to design")
    parser.add_argument("structure", nargs="?", type=Path, metavar="STRUCTURE", help="PDB or mmCIF file")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--weights",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="networks to design with: files, or monomer, monomer_ptm, multimer (default: mini, for trying it out)",
    )
    parser.add_argument(
        "--predict-weights",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="networks that fold the designs again (default: those of --weights)",
    )
    count: dict[str, Any] = {"type": whole_number(1), "metavar": "N"}
    of_task = add_task_options(parser)
    as_there = parser.add_argument_group("as in other programs")
    as_there.add_argument(
        "--preset",
        choices=PRESETS,
        help="settings of another program, which options of the command change (default colabdesign)",
    )
    as_there.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="BindCraft's settings_target file: structure, chains, hotspots and lengths",
    )
    as_there.add_argument(
        "--advanced",
        type=Path,
        metavar="FILE",
        help="BindCraft's settings_advanced file; implies --preset bindcraft",
    )
    add_field_options({"": parser.add_argument_group("optimisation")}, DesignConfig)
    after = parser.add_argument_group("sequences and filters")
    after.add_argument(
        "--predict-seeds",
        **count,
        default=1,
        help="fold each design with N seeds by each network of --predict-weights (default 1)",
    )
    after.add_argument(
        "--mpnn",
        metavar="PROGRAM",
        help="fold sequences of another program for the designed backbones as well: proteinmpnn, ligandmpnn, or a "
        "command with {pdb} and {out}, in quotes (docs/design.md)",
    )
    after.add_argument(
        "--mpnn-sequences",
        **count,
        default=PROGRAM_SEQUENCES,
        help=f"sequences of --mpnn for a backbone (default {PROGRAM_SEQUENCES})",
    )
    after.add_argument(
        "--mpnn-temperature",
        type=float,
        default=0.1,
        metavar="X",
        help="temperature of the sequences of --mpnn (default 0.1)",
    )
    after.add_argument(
        "--mpnn-omit", default="", metavar="LETTERS", help="residues that --mpnn never uses, besides --forbid"
    )
    after.add_argument(
        "--mpnn-soluble", action="store_true", help="weights of --mpnn that were trained on soluble proteins"
    )
    after.add_argument(
        "--mpnn-keep-interface",
        action="store_true",
        help="residues within 4 Å of other chains stay as designed",
    )
    after.add_argument(
        "--filters",
        type=Path,
        metavar="FILE",
        help="thresholds in YAML or JSON, named as BindCraft's: Average_pLDDT: {threshold: 0.8, higher: true}",
    )
    after.add_argument(
        "--where",
        metavar="CONDITION",
        help='condition on columns of designs.tsv that designs have to meet, such as "iptm>0.6 and rmsd<2"',
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--num-designs",
        "--num-seeds",
        **count,
        help=f"designs, of seeds from --seed on (default 1; with --until at most {_MOST_DESIGNS:,})",
    )
    run.add_argument(
        "--until",
        **count,
        help="fold designs one by one until N sequences pass --filters and --where; several processes may run the same "
        "command in one folder",
    )
    run.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="first seed (default 0)")
    run.add_argument("--precision", metavar="NAME", help="fp32 (default) or bf16")
    add_field_options(
        dict.fromkeys(("machine", "memory", "ranks", "structures"), run), InferConfig, only=_OF_FOLDS
    )
    run.add_argument("--overwrite", action="store_true", help="start again where settings differ")
    add_config_options(parser)
    parser.set_defaults(run=run_design, quiet=False, of_task=of_task)


def run_design(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    announce(options)
    from fastfold.inference.setting_values import check_seeds
    from fastfold.products.design.run import TABLE, DesignRequest, run_designs

    def say(line: str) -> None:
        print(line, flush=True)

    advanced = _bindcraft(options, say)
    task, config = design_task(options), _design_config(options, advanced)
    if options.precision not in (None, "fp32", "bf16"):
        raise ConfigError(f"--precision: expected fp32 or bf16, found {options.precision!r}")
    count = options.num_designs or (1 if options.until is None else _MOST_DESIGNS)
    seeds = check_seeds(range(options.seed, options.seed + count))
    request = DesignRequest(
        task,
        options.out,
        options.weights,
        config,
        seeds=seeds,
        predict=options.predict_weights,
        infer=InferConfig(
            **field_values(options, InferConfig, only=_OF_FOLDS),
            seeds=tuple(range(options.predict_seeds)),
            num_recycles=None if advanced is None else advanced.fold_recycles,
        ),
        filters=options.filters,
        condition=options.where,
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


def _bindcraft(options: argparse.Namespace, say: Callable[[str], None]) -> AdvancedSettings | None:
    """Read BindCraft's files and fill in options that the command lacks; None without BindCraft's settings."""
    if options.settings is None and options.advanced is None and options.preset != "bindcraft":
        return None
    if options.protocol != "binder":
        raise ConfigError(f"BindCraft designs binders: its settings do not belong to {options.protocol}")
    if options.preset == "colabdesign":
        raise ConfigError("--preset colabdesign excludes --settings and --advanced; leave out one of them")
    if options.settings is not None:
        target = read_target(options.settings, say)
        options.structure = options.structure or target.structure
        options.chains, options.hotspots = (
            options.chains or target.chains,
            options.hotspots or target.hotspots,
        )
        options.length = options.length or target.length
        if options.filters is not None:
            options.until = options.until or target.until
    advanced = AdvancedSettings() if options.advanced is None else read_advanced(options.advanced, say)
    if options.flexible == "none":
        options.flexible = advanced.flexible
    return advanced


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


def _redesign(options: argparse.Namespace, forbid: str) -> Redesign | None:
    """Return the other program; None if there is none."""
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
