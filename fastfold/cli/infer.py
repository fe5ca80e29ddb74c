"""``fastfold infer``: fold the sequences of FASTA files."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from fastfold.cli.process import orderly_termination, silence_stdout
from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig

_INFER = """\
Fold every record of the FASTA files. Several chains joined by ':' in one record are a complex; with --complex all
records of a file are one. For each target DIR gets, best prediction first,

  <id>_rank_001_<model>_seed_<n>.pdb, .cif   structure; pLDDT (0-100) is in the B-factor column
  <id>_rank_001_..._scores.json              pLDDT per residue, mean pLDDT, pTM, ipTM, ranking confidence
  <id>_rank_001_..._pae.json                 predicted aligned error, as AlphaFold DB has it
  <id>_rank_001_....png                      plots of both
  <id>_config.json, <id>_complete.json       settings, versions, input hash; what was written

Run it again to continue: targets that are finished with the same input and settings are skipped.
"""


_INFER_EPILOG = """\
alignments:
  The prediction is far better with an alignment. --msa-dir DIR is searched for <id>.a3m, <id>.a3m.gz, <id>.sto, and
  for *.a3m and *.sto in <id>/ (as OpenFold and AlphaFold lay them out; chains of a complex: <id>_A/, <id>/A/).
  FastFold does not search sequence databases itself.

weights:
  Official AlphaFold files (params_model_1.npz ... params_model_5_multimer_v3.npz), OpenFold checkpoints (.pt) and
  FastFold files (.safetensors). With several, each target is folded by every one that suits it (complexes by
  multimer networks, single chains by monomer networks) and the predictions are ranked. Without any, the small network
  that ships with FastFold is used (mini), which is for trying things out.

exit code: 0 all targets folded or finished before; 1 at least one failed, or nothing could be done; 2 wrong use of
the command; 130 stopped by Ctrl-C. With FASTFOLD_DEBUG=1 in the environment failures show their traceback.
"""


def add_infer_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    infer = commands.add_parser(
        "infer",
        help="fold the sequences of FASTA files",
        usage="fastfold infer FASTA [FASTA ...] --out DIR [--weights FILE ...] [options]",
        description=_INFER,
        epilog=_INFER_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    infer.add_argument("inputs", nargs="*", type=Path, metavar="FASTA", help="FASTA files (.gz too)")
    infer.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    infer.add_argument(
        "--weights",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        default=[],
        help="weights files (default: mini)",
    )
    infer.add_argument("--msa-dir", type=Path, metavar="DIR", help="folder of alignments, found by record id")
    infer.add_argument("--complex", action="store_true", help="all records of a file are one complex")
    infer.add_argument(
        "--reference",
        type=Path,
        metavar="PATH",
        help="experimental structure to compare with, or a folder of files named like the targets",
    )
    infer.add_argument(
        "--num-recycles",
        type=_count,
        metavar="N",
        help="passes after the first (monomers 3, multimers up to 20)",
    )
    infer.add_argument(
        "--seed",
        type=_count,
        default=InferConfig.seed,
        metavar="N",
        help="seed of everything random (default 0)",
    )
    infer.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default=InferConfig.precision,
        help="bf16 halves the memory and is faster on GPUs (default fp32)",
    )
    infer.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default=InferConfig.device,
        help="default: a GPU where there is one",
    )
    infer.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="memory that a fold may take, 24GiB for example (default: what the device has free); the sizes of all "
        "blocks follow from it",
    )
    infer.add_argument(
        "--pae",
        choices=("auto", "yes", "no"),
        default="auto",
        help="write the predicted aligned error of all pairs of residues (default: of targets up to 5,000 residues; "
        "pTM and ipTM are computed anyway)",
    )
    infer.add_argument("--no-plots", action="store_true", help="write no plots")
    infer.add_argument(
        "--parallel",
        metavar="dap=N",
        help="N processes, started by torchrun, fold each target together: memory and work of each fall with N",
    )
    infer.set_defaults(run=run_infer)


def _count(text: str) -> int:
    """A whole number from zero up, as an argument type."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 0 to 2147483647")
    return int(text)


def run_infer(options: argparse.Namespace) -> int:
    """Carry the subcommand out; returns the exit code.

    Raises:
        ConfigError: What was asked for is wrong or impossible.
    """
    misplaced = [path for path in options.weights if re.search(r"\.(fa|faa|fas|fasta)(\.gz)?$", path.name)]
    if misplaced:
        raise ConfigError(
            f"{misplaced[0]}: every name after --weights is a weights file; put FASTA files first"
        )
    if not options.inputs:
        raise ConfigError("no FASTA file given; fastfold infer --help explains the command")

    from fastfold.inference.runner import run

    config = InferConfig(
        num_recycles=options.num_recycles,
        seed=options.seed,
        precision=options.precision,
        plots=not options.no_plots,
        pae={"auto": None, "yes": True, "no": False}[options.pae],
        device=options.device,
        parallel=options.parallel,
        memory_budget=options.memory_budget or None,
    )
    with orderly_termination():
        summary = run(
            options.inputs,
            options.out,
            options.weights,
            config,
            msa_dir=options.msa_dir,
            complex_=options.complex,
            reference=options.reference,
        )
    if int(os.environ.get("RANK", "0")) > 0:  # the first process speaks for all
        return 0
    counts = [f"{len(summary.folded)} folded"]
    counts += [f"{len(summary.skipped)} finished before"] if summary.skipped else []
    counts += [f"{len(summary.failed)} failed"] if summary.failed else []
    where = f"; results in {options.out}" if summary.folded or summary.skipped else ""
    try:
        print(", ".join(counts) + where, flush=True)
    except BrokenPipeError:  # the results are there anyway
        silence_stdout()
    return 1 if summary.failed else 0
