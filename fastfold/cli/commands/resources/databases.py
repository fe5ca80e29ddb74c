"""``fastfold databases``: list AlphaFold's databases, and download them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastfold.cli.commands.resources.weights import download_bar
from fastfold.inference.progress import print_line
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.option_fields import argument, option

_DOWNLOAD = """\
Fetch databases that AlphaFold 2.3's scripts download, from their publishers' servers, into folders of DIR:

  fastfold databases download uniref90 mgnify small_bfd --dir /data/alphafold
  fastfold infer protein.fasta --out results --weights monomer_ptm --databases /data/alphafold

The sizes of all downloads are shown first, and compared with the free space. Run the same command again to continue
after an interruption. Packed files are checked by their size, by the server's MD5 sum where it states one, and when
they are unpacked; record.json in each folder records the SHA-256 of each file. 'fastfold databases list' shows the
names.
"""


@dataclass(frozen=True)
class DatabasesDownload:
    """Databases to download, and their places."""

    names: Sequence[str] = argument(
        nargs="+", metavar="NAME", help="uniref90, mgnify, small_bfd ... (see 'fastfold databases list')"
    )
    folder: Path = option(
        "--dir", is_required=True, parse=Path, metavar="DIR", help="folder of all databases"
    )
    mirror: str | None = option(
        default=None,
        metavar="URL|DIR",
        help="source of the packed files: the address of a folder that has them, or a folder on the disk",
    )
    dry_run: bool = option(default=False, help="show the sizes and stop")
    quiet: bool = option(default=False, help="print only the folders")


def add_databases_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    databases = commands.add_parser("databases", help="list AlphaFold's databases, or download them")
    actions = databases.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show names, sizes, uses and licences")
    listing.set_defaults(run=_list)
    download = actions.add_parser("download", help="fetch databases", description=_DOWNLOAD)
    add_field_options({"": download}, DatabasesDownload)
    download.set_defaults(run=_download)


def _list(options: argparse.Namespace) -> int:
    from fastfold.data.databases.published import DATABASES
    from fastfold.inference.output.summary import aligned_table

    lines = [
        {
            "name": one.name,
            "download": f"{one.download_gb:g} GB",
            "on disk": f"{one.unpacked_gb:g} GB",
            "use": one.use,
            "licence": one.license,
        }
        for one in DATABASES
    ]
    print(aligned_table(lines, list(lines[0])))
    print(
        "Sizes are those that AlphaFold's README states; 'fastfold databases download --dry-run' asks the servers."
    )
    return 0


def _download(namespace: argparse.Namespace) -> int:
    from fastfold.data.databases.download import check_room, database_sizes, download_databases
    from fastfold.data.databases.published import find_published
    from fastfold.utils.atomic_files import prepare_output_directory

    options = from_options(DatabasesDownload, namespace)
    say = partial(print_line, quiet=options.quiet)
    databases = [find_published(name) for name in dict.fromkeys(options.names)]
    folder = prepare_output_directory(options.folder)
    sizes = database_sizes(databases, folder, mirror=options.mirror, say=say)
    for one in sizes:
        name = one.database.name
        if one.is_present:
            say(f"{name}: present")
        elif one.download is None:
            say(f"{name}: about {one.database.download_gb:g} GB by rsync")
        else:
            say(f"{name}: {_gigabytes(one.download)} to download, about {_gigabytes(one.needed)} needed")
    if options.dry_run:
        return 0
    check_room(sizes, folder)
    with download_bar(options.quiet) as progress:
        places = download_databases(databases, folder, mirror=options.mirror, say=say, progress=progress)
    for place in places:
        print(place)
    return 0


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
