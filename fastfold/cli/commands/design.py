"""``fastfold design``: sequences for a fold, a backbone, a motif or a binding site."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastfold.cli.options.fold import add_memory_options
from fastfold.cli.process import orderly_termination
from fastfold.errors import ConfigError

if TYPE_CHECKING:
    from fastfold.inference.design.optimise import DesignConfig
    from fastfold.inference.design.task import DesignTask

PROTOCOLS = ("hallucinate", "fixbb", "partial", "binder")

_DESIGN = """\
Design protein sequences by gradients of an AlphaFold network, as ColabDesign and BindCraft do:

  hallucinate          a fold of --length residues; --copies for oligomers, --cyclic for rings
  fixbb STRUCTURE      a sequence for the backbone of a chain; --keep residues that stay
  partial STRUCTURE    everything around a --motif, whose structure and residues stay
  binder STRUCTURE     a chain of --length residues that binds the given ones at --hotspots

Each seed gives one design. All designs are folded again from their sequences alone, and DIR gets the files and the page
of fastfold infer, and

  designs.fasta, designs.tsv     sequences; their table, best fold first, with the deviation of the fold from the design
  trajectories/<name>.jsonl      figures of each step; .png plots them
  trajectories/<name>.pdb        CA atoms of the steps, a model each

The same command continues a design that was stopped.
"""

_EPILOG = """\
losses (--loss NAME=WEIGHT): con, i_con, plddt, pae, i_pae, exp_res, helix, rg, NC, clashes, seq_ent, and with a given
  structure dgram_cce, fape, rmsd. By default hallucinate has con=1 (oligomers: i_con=1), fixbb dgram_cce=1, partial
  dgram_cce=1 con=1, binder i_con=1 plddt=0.1.

examples:
  fastfold design hallucinate --length 60 --out designs
  fastfold design fixbb backbone.pdb --weights monomer_ptm --out designs --num-designs 8
  fastfold design binder target.pdb --chains A --hotspots A54,A58 --length 80 --weights multimer --out designs
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    task = parser.add_argument_group("task")
    task.add_argument("--length", type=int, metavar="N", help="residues to design, of one chain")
    task.add_argument("--copies", type=int, default=1, metavar="N", help="equal chains (default 1)")
    task.add_argument("--cyclic", action="store_true", help="designed chains are rings")
    task.add_argument("--chains", default="", metavar="A,B", help="chains of STRUCTURE to use")
    task.add_argument("--keep", default="", metavar="A1-5,A9", help="residues of fixbb that stay")
    task.add_argument("--motif", default="", metavar="A1-5,A9", help="residues of partial that stay")
    task.add_argument("--hotspots", default="", metavar="A1-5,A9", help="residues that a binder touches")
    optimisation = parser.add_argument_group("optimisation")
    optimisation.add_argument(
        "--steps",
        default="300,100,10",
        metavar="S,T,H",
        help="steps from logits to softmax, of sharpening, and on residues (default 300,100,10)",
    )
    optimisation.add_argument(
        "--mutations",
        default="0,10",
        metavar="N[,TRIES]",
        help="rounds of mutations at the end, each the best of TRIES (default 0,10)",
    )
    optimisation.add_argument(
        "--loss",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=WEIGHT",
        help="weights of losses that differ from the defaults below",
    )
    optimisation.add_argument(
        "--optimizer",
        choices=("sgd", "adam"),
        default="sgd",
        help="default sgd, with gradients of unit length",
    )
    optimisation.add_argument("--learning-rate", type=float, default=0.1, metavar="X", help="default 0.1")
    optimisation.add_argument(
        "--num-recycles", type=int, default=0, metavar="N", help="extra passes of a step (default 0)"
    )
    optimisation.add_argument(
        "--recycle-mode",
        choices=("last", "average"),
        default="last",
        help="passes whose gradient counts (default last)",
    )
    optimisation.add_argument("--no-dropout", action="store_true", help="no dropout in any step")
    optimisation.add_argument(
        "--num-models",
        type=int,
        default=1,
        metavar="N",
        help="networks drawn for a step (default 1; 0 for all)",
    )
    optimisation.add_argument(
        "--start",
        choices=("gumbel", "random", "wildtype"),
        default="gumbel",
        help="first sequence (default gumbel)",
    )
    optimisation.add_argument(
        "--forbid", default="", metavar="LETTERS", help="residues never used, such as CM"
    )
    optimisation.add_argument(
        "--give-up-below",
        type=float,
        default=0.0,
        metavar="PLDDT",
        help="end a design whose pLDDT is lower after the first stage (default 0)",
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--num-designs", type=int, default=1, metavar="N", help="designs, of seeds from --seed on"
    )
    run.add_argument("--seed", type=int, default=0, metavar="N", help="first seed (default 0)")
    run.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda, or cuda:1")
    run.add_argument("--precision", metavar="NAME", help="fp32 (default) or bf16")
    add_memory_options(run)
    run.add_argument("--overwrite", action="store_true", help="start again where settings differ")
    parser.set_defaults(run=run_design)


def run_design(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code.

    Raises:
        ConfigError: Options contradict each other.
    """
    from fastfold.inference.config import InferConfig, check_seeds
    from fastfold.inference.design.run import TABLE, run_designs

    task, config = design_task(options), design_config(options)
    if options.num_designs < 1:
        raise ConfigError(f"--num-designs: expected a number from 1, found {options.num_designs}")
    if options.precision not in (None, "fp32", "bf16"):
        raise ConfigError(f"--precision: expected fp32 or bf16, found {options.precision!r}")
    seeds = check_seeds(range(options.seed, options.seed + options.num_designs))
    with orderly_termination():
        designs = run_designs(
            task,
            options.out,
            options.weights,
            config,
            seeds=seeds,
            predict=options.predict_weights,
            infer=InferConfig(
                device=options.device,
                precision=options.precision,
                memory_budget=options.memory_budget,
                host_memory=options.host_memory,
            ),
            overwrite=options.overwrite,
            say=lambda line: print(line, flush=True),
        )
    print(
        f"{len(designs)} designed. Table: {options.out / TABLE}. Open {options.out / 'report.html'}",
        flush=True,
    )
    return 0


def design_task(options: argparse.Namespace) -> DesignTask:
    """Return the task of a command line.

    Raises:
        ConfigError: An option is missing, or belongs to another protocol.
        InputError: The structure cannot be used.
    """
    from fastfold.inference.design import binder, fixed_backbone, hallucination, partial

    protocol, structure = options.protocol, options.structure
    chains = [name for name in options.chains.split(",") if name]
    used = {
        "hallucinate": ("length", "copies", "cyclic"),
        "fixbb": ("chains", "keep"),
        "partial": ("chains", "motif"),
        "binder": ("length", "chains", "hotspots"),
    }[protocol]
    defaults = {
        "length": None,
        "copies": 1,
        "cyclic": False,
        "chains": "",
        "keep": "",
        "motif": "",
        "hotspots": "",
    }
    for name, default in defaults.items():
        if name not in used and getattr(options, name) != default:
            raise ConfigError(
                f"--{name} does not belong to {protocol}; its options are {', '.join(map('--{}'.format, used))}"
            )
    if "length" in used and options.length is None:
        raise ConfigError(f"{protocol} needs --length, the number of residues to design")
    if protocol == "hallucinate":
        if structure is not None:
            raise ConfigError(
                f"hallucinate takes no structure, found {structure}; fixbb designs for a backbone"
            )
        return hallucination(options.length, copies=options.copies, cyclic=options.cyclic)
    if structure is None:
        raise ConfigError(f"{protocol} needs a structure: fastfold design {protocol} FILE --out DIR")
    if protocol == "binder":
        return binder(structure, options.length, chains=chains, hotspots=options.hotspots)
    if len(chains) > 1:
        raise ConfigError(f"{protocol} takes one chain, found --chains {options.chains}")
    chain = chains[0] if chains else None
    if protocol == "partial":
        return partial(structure, options.motif, chain=chain)
    return fixed_backbone(structure, chain=chain, keep=options.keep)


def design_config(options: argparse.Namespace) -> DesignConfig:
    """Return the settings of a command line.

    Raises:
        ConfigError: A value cannot be read or is out of range.
    """
    from fastfold.inference.design import DesignConfig

    soft, temperature, hard = _numbers("--steps", options.steps, 3)
    rounds, tries = (*_numbers("--mutations", options.mutations, 2), 10)[:2]
    return DesignConfig(
        soft_steps=soft,
        temperature_steps=temperature,
        hard_steps=hard,
        mutation_steps=rounds,
        tries=tries,
        optimizer=options.optimizer,
        learning_rate=options.learning_rate,
        recycles=options.num_recycles,
        recycle_mode=options.recycle_mode,
        dropout=not options.no_dropout,
        networks=options.num_models or None,
        start=options.start,
        weights=dict(map(_weight, options.loss)),
        forbid=options.forbid,
        give_up_below=options.give_up_below,
    )


def _numbers(option: str, text: str, count: int) -> list[int]:
    parts = text.split(",")
    if (
        not all(part.strip().isdigit() for part in parts)
        or len(parts) > count
        or (count == 3 and len(parts) < 3)
    ):
        raise ConfigError(f"{option}: expected {count} whole numbers with commas, found {text!r}")
    return [int(part) for part in parts]


def _weight(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--loss: expected NAME=WEIGHT such as rg=0.3, found {text!r}") from None
