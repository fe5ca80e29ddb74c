"""Commands about this installation.

``fastfold verify`` compares it with recorded runs, ``fastfold environment`` describes its parts.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.errors import InputError
from fastfold.inference.config import PRECISIONS
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.option_fields import argument, option


@dataclass(frozen=True)
class VerifyOptions:
    """Recorded runs, and device and precision to repeat them in."""

    directories: tuple[Path, ...] = argument(
        default=(), nargs="*", parse=Path, metavar="ORACLE_DIR", help=None
    )
    device: str = option(default="auto", choices=("auto", "cpu", "cuda"), help=None)
    precision: str = option(
        default="fp32",
        choices=PRECISIONS,
        help="of the network (default fp32); in the others outputs may be off by 3%%, in bf16 by 10%%",
    )


def add_verify_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    verify = commands.add_parser(
        "verify",
        help="compare this installation with the official AlphaFold program",
        description="Repeat a recorded run of the official program, of its network, of its data pipeline (a folder "
        "with expected.npz, query.fasta and alignments) or of its template search, and print, for each output, the "
        "relative error, the largest absolute error (Å for positions) and whether both are within tolerance. A folder "
        "of such folders means all of them; of several, one without its inputs is skipped. Without a folder, a small "
        "fold by mini is repeated, whose record ships with FastFold: it finds a broken installation or device.",
        formatter_class=argparse.HelpFormatter,
    )
    add_field_options({"": verify}, VerifyOptions)
    verify.set_defaults(run=run_verify)


def run_verify(namespace: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    from fastfold.evoformer.precision import about_missing_units, choose_precision
    from fastfold.products.verify import RECORD, MissingInputError, recorded_runs, verify
    from fastfold.utils.device import choose_device

    options = from_options(VerifyOptions, namespace)
    device = choose_device(options.device)
    precision, _ = choose_precision(options.precision, device)
    asked: dict[str, Any] = {} if precision == "fp32" else {"precision": precision}
    if slow := about_missing_units(precision, device):
        print(slow)
    failed = total = skipped = 0
    runs = [run for folder in options.directories for run in recorded_runs(folder)] or [RECORD]
    for directory in runs:
        print(f"{directory} on {device}" + (f" in {precision}" if asked else ""))
        print(f"{'output':<76} {'relative':>9} {'largest':>9}")
        try:
            for output in verify(directory, device=str(device), **asked):
                verdict = "pass" if output.passed else "FAIL"
                print(f"{output.name:<76} {output.relative_error:9.1e} {output.largest_error:9.1e} {verdict}")
                failed, total = failed + (not output.passed), total + 1
        except InputError as error:
            if len(runs) == 1:
                raise
            is_missing = isinstance(error, MissingInputError)
            print(f"skipped: {error}" if is_missing else f"FAIL: {error}")
            skipped, failed, total = skipped + is_missing, failed + (not is_missing), total + (not is_missing)
    recorder = "the official program" if options.directories else "the record of this release"
    left = f"; {skipped} of {len(runs)} cases skipped for lack of inputs" if skipped else ""
    print(f"{total - failed} of {total} outputs agree with {recorder}{left}")
    return 1 if failed or not total else 0


def add_environment_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    environment = commands.add_parser(
        "environment",
        help="print versions, devices, packages and settings, for a bug report",
        description="Print versions, processor, memory, GPUs, packages and FASTFOLD variables of this installation, "
        "to be copied into a bug report. Nothing is sent, and no path is printed.",
        formatter_class=argparse.HelpFormatter,
    )
    environment.set_defaults(run=run_environment)


def run_environment(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code."""
    from fastfold.products.verify.environment import describe_environment

    for name, value in describe_environment().items():
        print(f"{name:<22} {value}")
    return 0
