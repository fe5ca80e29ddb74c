"""The ``fastfold`` command. Imports stay inside the commands, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fastfold._version import __version__
from fastfold.environment import prepare_environment
from fastfold.errors import ConfigError, FastFoldError
from fastfold.inference.failures import debugging, internal_error
from fastfold.plan_command import add_plan_command

_EPILOG = """\
examples:
  fastfold infer protein.fasta --out results --weights params_model_1_ptm.npz
  fastfold infer *.fasta --out results --weights params_model_*_ptm.npz --msa-dir alignments
  fastfold infer complex.fasta --out results --weights params_model_1_multimer_v3.npz --complex
  fastfold weights info params_model_1_ptm.npz
"""

_INFER = """\
Fold every record of the FASTA files. Several chains joined by ':' in one record are a complex; with --complex all
records of a file are one. For each target DIR gets, best prediction first,

  <id>_rank_001_<model>_seed_<n>.pdb, .cif   structure; pLDDT (0-100) is in the B-factor column
  <id>_rank_001_..._scores.json              pLDDT per residue, mean pLDDT, pTM, ipTM, ranking confidence
  <id>_rank_001_..._pae.json                 predicted aligned error, as AlphaFold DB has it
  <id>_rank_001_....png                      pictures of both
  <id>_config.json, <id>_complete.json       settings, versions, input hash; what was written

Run it again to continue: targets that are finished with the same input and settings are skipped.
"""

_TRAIN = """\
Train a network on real structures. Everything is a setting of Hydra's groups model, data, optim, trainer, parallel,
memory, logger and finetune; a preset chooses for all of them at once.

  fastfold train +preset=overfit data.directory=1ten.pdb trainer.out=run     one structure, minutes on a CPU
  fastfold train +preset=mini data.directory=DATA trainer.out=run            a small network on a CPU
  fastfold train +preset=initial data.directory=DATA trainer.out=run         AlphaFold's initial training
  fastfold train +preset=finetune model.weights=params_model_1_ptm.npz finetune=lora data.directory=DATA ...
  torchrun --nproc-per-node 8 -m fastfold train ...                          the same on 8 GPUs of one machine

DATA has structure files (PDB, mmCIF, .gz too), msas/<name>.a3m and perhaps an index.tsv; with data.layout=openfold it
has mmcifs/, alignments/<id>_<chain>/ and chain_data_cache.json. The folder of the run gets checkpoints, metrics,
validations, the trained weights and a report. Run the same command again to continue after an interruption.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Errors that a user can cause are printed as one message, without a traceback.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    prepare_environment()
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except FastFoldError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("stopped; what was finished is kept, run the same command to continue", 130)
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except Exception as error:
        if debugging():
            raise
        return _fail(internal_error(error), 1)


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"fastfold: {message}", file=sys.stderr)
    return code


def _silence_stdout() -> None:
    """After the reader of our output went away, so that Python does not complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="fastfold",
        description="Protein structure prediction with the AlphaFold 2 networks.",
        epilog=_EPILOG,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"fastfold {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    infer = commands.add_parser(
        "infer",
        help="fold the sequences of FASTA files",
        usage="fastfold infer FASTA [FASTA ...] --out DIR [--weights FILE ...] [options]",
        description=_INFER,
        epilog=_INFER_EPILOG,
        formatter_class=raw,
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
        "--seed", type=_count, default=0, metavar="N", help="seed of everything random (default 0)"
    )
    infer.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="bf16 halves the memory and is faster on GPUs (default fp32)",
    )
    infer.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one"
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
        "pTM and ipTM are computed all the same)",
    )
    infer.add_argument("--no-plots", action="store_true", help="write no pictures")
    infer.add_argument(
        "--parallel",
        metavar="dap=N",
        help="N processes, started by torchrun, fold each target together: memory and work of each fall with N",
    )
    infer.set_defaults(run=_infer)

    train = commands.add_parser(
        "train",
        help="train or fine-tune a network on known structures",
        usage="fastfold train [--cfg job] [+preset=NAME] [group=CHOICE ...] [group.key=VALUE ...]",
        description=_TRAIN,
        formatter_class=raw,
    )
    train.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings, as Hydra takes them")
    train.add_argument("--cfg", choices=("job",), help="print the whole configuration and stop")
    train.set_defaults(run=_train)

    add_plan_command(commands)

    verify = commands.add_parser(
        "verify",
        help="compare this installation with the official AlphaFold program",
        description="Run the network on a recorded run of the official program and print, for each output, the "
        "relative error, the largest absolute error (Å for positions) and whether both are within tolerance.",
    )
    verify.add_argument("directories", nargs="+", type=Path, metavar="ORACLE_DIR")
    verify.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    verify.set_defaults(run=_verify)

    weights = commands.add_parser("weights", help="tell what a weights file is, or convert it")
    actions = weights.add_subparsers(title="actions", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="tell what a weights file is")
    info.add_argument("file", type=Path, metavar="FILE")
    info.set_defaults(run=_weights_info)
    convert = actions.add_parser(
        "convert",
        help="write the parameters in another format",
        description="Convert a weights file. The ending of OUT says the format: .safetensors (FastFold's own, with "
        "the configuration inside) or .npz (AlphaFold's).",
    )
    convert.add_argument("source", type=Path, metavar="IN")
    convert.add_argument("target", type=Path, metavar="OUT")
    convert.set_defaults(run=_weights_convert)
    return parser


def _count(text: str) -> int:
    """A whole number from zero up, as an argument type."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 0 to 2147483647")
    return int(text)


def _infer(options: argparse.Namespace) -> int:
    misplaced = [path for path in options.weights if re.search(r"\.(fa|faa|fas|fasta)(\.gz)?$", path.name)]
    if misplaced:
        raise ConfigError(
            f"{misplaced[0]}: every name after --weights is a weights file; put FASTA files first"
        )
    if not options.inputs:
        raise ConfigError("no FASTA file given; fastfold infer --help explains the command")

    from fastfold.inference.runner import Settings, run
    from fastfold.memory import parse_bytes

    settings = Settings(
        num_recycles=options.num_recycles,
        seed=options.seed,
        precision=options.precision,
        plots=not options.no_plots,
        pae={"auto": None, "yes": True, "no": False}[options.pae],
    )
    with _orderly_termination():
        summary = run(
            options.inputs,
            options.out,
            options.weights,
            msa_dir=options.msa_dir,
            complex_=options.complex,
            reference=options.reference,
            device=options.device,
            settings=settings,
            parallel=options.parallel,
            memory_budget=parse_bytes(options.memory_budget) if options.memory_budget else None,
        )
    if int(os.environ.get("RANK", "0")) > 0:  # the first process speaks for all
        return 0
    counts = [f"{len(summary.folded)} folded"]
    counts += [f"{len(summary.skipped)} finished before"] if summary.skipped else []
    counts += [f"{len(summary.failed)} failed"] if summary.failed else []
    where = f"; results in {options.out}" if summary.folded or summary.skipped else ""
    try:
        print(", ".join(counts) + where, flush=True)
    except BrokenPipeError:  # the results are there all the same
        _silence_stdout()
    return 1 if summary.failed else 0


def _train(options: argparse.Namespace) -> int:
    from fastfold.training.compose import compose_config, compose_tree, to_yaml

    if options.cfg:
        print(to_yaml(compose_tree(options.overrides)), end="")
        return 0
    config = compose_config(options.overrides)

    from fastfold.training.run import train

    return 0 if train(config) else 128 + signal.SIGTERM


@contextlib.contextmanager
def _orderly_termination() -> Iterator[None]:
    """Let a batch system that ends the program (SIGTERM) leave no temporary files behind, as Ctrl-C does."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    except ValueError:  # not in the main thread, which alone hears of signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _verify(options: argparse.Namespace) -> int:
    from fastfold.inference.verify import verify
    from fastfold.utils.device import choose_device

    device = choose_device(options.device)
    failed = total = 0
    for directory in options.directories:
        print(f"{directory} on {device}")
        print(f"{'output':<76} {'relative':>9} {'largest':>9}")
        for found in verify(directory, device=str(device)):
            verdict = "pass" if found.passed else "FAIL"
            print(f"{found.name:<76} {found.relative_error:9.1e} {found.largest_error:9.1e} {verdict}")
            failed, total = failed + (not found.passed), total + 1
    print(f"{total - failed} of {total} outputs agree with the official program")
    return 1 if failed else 0


def _weights_info(options: argparse.Namespace) -> int:
    from fastfold.evoformer.checkpoint import weights_info

    print(weights_info(options.file).describe())
    return 0


def _weights_convert(options: argparse.Namespace) -> int:
    from fastfold.evoformer.checkpoint import convert

    info = convert(options.source, options.target)
    print(f"wrote {options.target}: {info.parameters:,} parameters from {options.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
