"""``fastfold relax``: relax the structures in PDB and mmCIF files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError, FastFoldError, OutputError, PlaceError, WriteError
from fastfold.inference.error_messages import debugging, internal_error
from fastfold.inference.progress import print_line
from fastfold.inference.relax.config import RelaxConfig
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.option_fields import argument, option

_RELAX = """\
Relax the protein chains of PDB and mmCIF files (.gz too), and of folders of them, as AlphaFold does: hydrogens and
missing heavy atoms are added, and the Amber99sb energy is minimised with springs on the heavy atoms. For each file DIR
gets

  <stem>_relaxed.pdb, .cif   structure with hydrogens; chains, numbers and B-factors (pLDDT) are kept
  <stem>_relax.json          energies, movement, residues with violations, platform, seconds

A structure whose energy stays positive or whose violations remain is written too, and reported as not relaxed, with
the residues.
"""

_RELAX_EPILOG = """\
platforms: OpenMM's. auto takes the first of CUDA, HIP, OpenCL and CPU that works here. CUDA and HIP need
  the extras cuda12, cuda13 or hip (pip install "fastfold[cuda12]"). On the CPU with one thread and on Reference the
  same input gives the same structure files each time; with more threads and on GPUs they vary a little.

exit code: 0 all files relaxed; 1 at least one failed or did not count as relaxed; 2 wrong use of the command; 130
stopped by Ctrl-C.
"""


@dataclass(frozen=True)
class RelaxOptions:
    """Files of the command, and the place of its results."""

    files: Sequence[Path] = argument(
        nargs="+",
        parse=Path,
        group="files",
        metavar="FILE",
        help="PDB and mmCIF files (.gz too), and folders",
    )
    out: Path | None = option(
        default=None,
        parse=Path,
        group="files",
        metavar="DIR",
        help="folder for the results (default: that of each file)",
    )
    overwrite: bool = option(default=False, help="replace existing results")


def add_relax_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    relax = commands.add_parser(
        "relax",
        help="relax structures in the Amber force field",
        usage="fastfold relax FILE [FILE ...] [--out DIR] [options]",
        description=_RELAX,
        epilog=_RELAX_EPILOG,
    )
    add_field_options({"files": relax}, RelaxOptions)
    add_field_options({"": relax}, RelaxConfig, RelaxOptions)
    relax.set_defaults(run=run_relax)


def run_relax(namespace: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise ConfigError."""
    from fastfold.inference.relax.files import relax_file, result_paths, structures_to_relax

    options, config = from_options(RelaxOptions, namespace), from_options(RelaxConfig, namespace)
    failed = 0
    written: set[Path] = set()
    files = structures_to_relax(options.files)
    for path in files:
        try:
            if not written.isdisjoint(result_paths(path, options.out).values()):
                raise OutputError("another file of this run has the same name; relax it into another --out")
            result, paths = relax_file(
                path, options.out, config, overwrite=options.overwrite, on_progress=partial(_say, path)
            )
        except ConfigError:
            raise
        except FastFoldError as error:
            if isinstance(error, WriteError) and not isinstance(error, PlaceError):
                raise  # no file can be written
            failed += 1
            message = str(error)
            print_line(f"fastfold: {message if message.startswith(str(path)) else f'{path}: {message}'}")
        except Exception as error:
            if debugging():
                raise
            failed += 1
            print_line(f"fastfold: {path}: {internal_error(error)}")
        else:
            failed += not result.relaxed
            written.update(paths.values())
            print(f"{path}: {result}", flush=True)
    total = len(files)
    print(f"{total - failed} of {total} relaxed", flush=True)
    return 1 if failed else 0


def _say(path: Path, line: str) -> None:
    print_line(f"{path}: {line}")
