"""Download of DeepMind's published parameters, resumable after broken connections and interruptions.

The source is an archive on a server or on the disk, or a folder of its files. Only requested files are read, found by
name and in place. An archive is untrusted data: its contents never decide where files are written, and its headers are
read one block at a time. An incomplete file has a name that ends in ``.partial``, from which a later run resumes if the
archive is unchanged. A file gets its final name after it is complete and checked.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fastfold.errors import ConfigError, NetworkError, WeightsError, WriteError, spelled
from fastfold.evoformer.weights.checkpoint import weights_info
from fastfold.evoformer.weights.published import (
    ARCHIVE,
    LICENSE,
    SOURCE,
    SUMS,
    by_hand,
    file_name,
    listed,
    read_sums,
    record_sums,
    verify_recorded,
    weights_folder,
)
from fastfold.evoformer.weights.untrusted import SIZE_LIMIT, open_archive
from fastfold.utils.atomic_files import output_error, prepare_output_directory, write_atomic
from fastfold.utils.download.answers import Retries, Say, tell_nobody
from fastfold.utils.download.http import check_url
from fastfold.utils.download.pieces import Piece, Progress, Readable, fetch_piece, local_piece
from fastfold.utils.download.remote_file import RemoteFile
from fastfold.utils.download.tar_members import TarMemberError, tar_members
from fastfold.utils.hashing import file_digest
from fastfold.utils.locks import alone

_MAX_MEMBERS = 1000
_UNKNOWN_SIZE = 1 << 40  # of an archive whose server does not state it


@contextlib.contextmanager
def open_pieces(
    mirror: str | None, wanted: Sequence[str], say: Say
) -> Iterator[Iterator[Piece] | list[Piece]]:
    """Open the source of published parameters and find files in it.

    Args:
        mirror: As of :func:`download_weights`.
        wanted: Names of files.
        say: Called with messages about broken connections.

    Yields:
        The files: a list of all, or an iterator in the archive's order if the archive can only be read from beginning
        to end.

    Raises:
        ConfigError: The mirror cannot be read, or lacks a file.
        NetworkError: The server cannot be reached, lacks the archive, or sends an invalid response.
        WeightsError: The source is not an archive, or lacks a file.
    """
    if mirror is None or "://" in mirror:
        url = SOURCE if mirror is None else check_url(mirror, setting="`mirror`")
        if urlsplit(url).scheme == "http" and urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"):
            unsafe = f"`mirror={url}`: http:// does not protect files from changes on the way; use https:// if possible"
            say(spelled(unsafe))
        address = url if url.endswith(".tar") else f"{url}/{ARCHIVE}"
        with RemoteFile(address, retries=Retries(say=say)) as remote:
            pieces = _pieces(remote, remote.size or _UNKNOWN_SIZE, remote.url, wanted, (remote.version,))
            yield list(pieces) if remote.ranges else pieces
        return
    path = Path(mirror)
    folders = [folder for folder in (path, path / "params") if folder.is_dir()]
    archives = [folder / ARCHIVE for folder in folders if (folder / ARCHIVE).is_file()]
    with contextlib.ExitStack() as opened:
        try:
            if path.is_dir() and not archives:
                yield [local_piece(_find(folders, name, mirror), name, opened) for name in wanted]
            else:
                archive = archives[0] if archives else path
                whole = local_piece(archive, archive.name, opened)
                yield list(_pieces(whole.source, whole.size, str(archive), wanted, whole.version))
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise ConfigError(
                f"`mirror={mirror}`: cannot be read ({error.strerror}); check the path"
            ) from None


def _find(folders: list[Path], name: str, mirror: str) -> Path:
    """Return the file in the first folder that has it."""
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"`mirror={mirror}`: expected {ARCHIVE} or {name} in it, found neither")


def _pieces(
    source: Readable, size: int, place: str, wanted: Sequence[str], version: tuple[object, ...]
) -> Iterator[Piece]:
    """Yield the wanted members of a tar archive in its order, the first of each name."""
    lacking = list(wanted)
    try:
        for member in itertools.islice(tar_members(source, size=size), _MAX_MEMBERS):
            name = member.name.removeprefix("./").removeprefix("params/")
            if member.is_file and name in lacking:
                lacking.remove(name)
                yield Piece(name, place, source, member.offset, member.size, version)
                if not lacking:
                    return
    except TarMemberError as error:
        raise WeightsError(f"{place}: {error}. Use another source (`mirror`)") from None
    raise WeightsError(
        f"{place}: the archive ends without {', '.join(lacking)}; it is truncated, or is not {ARCHIVE}. Use another "
        "source (`mirror`)"
    )


_RESERVE = 16 << 20  # bytes to keep free on the disk
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


def download_weights(
    networks: Sequence[str],
    *,
    mirror: str | None = None,
    folder: Path | None = None,
    say: Say = tell_nobody,
    progress: Progress = tell_nobody,
) -> list[Path]:
    """Download published networks, and return their paths; files that are present are verified and kept.

    Args:
        networks: Official names, from :data:`~fastfold.evoformer.weights.published.PUBLISHED`.
        mirror: Other source: the address of the archive or of its folder, an archive on the disk, or a folder with
            the archive or its files. None for DeepMind's server.
        folder: Target folder; by default that of all commands.
        say: Called with log messages.
        progress: Called with the progress of a file.

    Raises:
        ConfigError: The mirror is neither an address nor on the disk.
        NetworkError: The server cannot be reached or sends an invalid response; the message names the missing files
            and how to add them by hand.
        WeightsError: The source is not an archive of parameters, or a file differs from its record.
        WriteError: The files cannot be written, or the disk lacks space.
    """
    folder = prepare_output_directory(folder or weights_folder())
    files = [file_name(network) for network in networks]
    with alone(folder, say):
        present = [name for name in files if (folder / name).is_file()]
        verify_recorded(folder, present)
        if present:
            say(f"already present and verified: {', '.join(present)}")
        if missing := [name for name in files if name not in present]:
            write_atomic(folder / "LICENSE", LICENSE + "\n")
            try:
                with open_pieces(mirror, missing, say) as pieces:
                    if isinstance(pieces, list):
                        _check_room(folder, pieces)
                    for piece in pieces:
                        _check_room(folder, [piece])
                        _bring(folder, piece, say, progress)
            except NetworkError as error:
                missing = [name for name in files if not (folder / name).is_file()]
                raise NetworkError(
                    f"{error}. Run the same command again to resume. Missing: "
                    f"{listed(missing)}. {by_hand(missing, folder)}"
                ) from error
    return [folder / name for name in files]


def _check_room(folder: Path, pieces: Sequence[Piece]) -> None:
    """Check that the disk has room for the remaining bytes."""
    needed = _RESERVE
    for piece in pieces:
        if piece.size > SIZE_LIMIT:
            raise WeightsError(
                f"{piece.name}: expected at most {SIZE_LIMIT >> 30} GiB, found {piece.size / 2**30:.1f} GiB. "
                "This is not the published archive; do not use it"
            )
        with contextlib.suppress(FileNotFoundError):
            needed -= piece.partial_path(folder).stat().st_size
        needed += piece.size
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WriteError(
            f"{folder} has {free / 1e6:,.0f} MB free, the remaining download needs {needed / 1e6:,.0f} MB; "
            "free some space, or set FASTFOLD_WEIGHTS to a folder on another disk, and run the same command again"
        )


def _bring(folder: Path, piece: Piece, say: Say, progress: Progress) -> None:
    """Download a file under a temporary name, check it, and rename it."""

    def check(partial: Path) -> None:
        digest = _checked(partial, piece.name, read_sums(folder).get(piece.name))
        record_sums(folder, {piece.name: digest})

    try:
        fetch_piece(piece, folder, check=check, say=say, progress=progress)
    except OSError as error:
        problem = output_error(folder / piece.name, "write", error)
        raise WriteError(f"{problem}. Run the same command again to resume") from error


def _checked(partial: Path, name: str, recorded: str | None) -> str:
    """Check a downloaded file and return its SHA-256; remove a file that fails."""
    try:
        with open_archive(partial) as archive:
            if damaged := archive.testzip():
                raise WeightsError(f"its member {damaged} is damaged")
        if weights_info(partial).multimer != ("multimer" in name):
            raise WeightsError("monomer or multimer network contrary to its name")
        digest = file_digest(partial)
        if recorded not in (None, digest):
            raise WeightsError(f"expected SHA-256 {str(recorded)[:16]}… ({SUMS}), found {digest[:16]}…")
    except (WeightsError, *_DAMAGED) as error:
        partial.unlink(missing_ok=True)
        raise WeightsError(
            f"the downloaded {name} failed its check ({error}) and was removed; run the same command again, or use "
            "another source (`mirror`)"
        ) from None
    return digest
