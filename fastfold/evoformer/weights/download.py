"""Fetching DeepMind's published parameters, through broken connections and kills, and nothing but what was asked for.

What has arrived of a file lies beside its place under a name that ends in ``.partial``, from which a later run goes on
if the archive is still the same one. A file gets its name when it is whole and has been looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from fastfold.errors import NetworkError, WeightsError, WriteError
from fastfold.evoformer.weights.archive import Piece, open_pieces
from fastfold.evoformer.weights.checkpoint import weights_info
from fastfold.evoformer.weights.published import (
    LICENCE,
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
from fastfold.utils.hashing import file_digest, input_hash
from fastfold.utils.locks import held

_RESERVE = 16 << 20  # bytes that stay free on the disk
_BLOCK = 1 << 16
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)

Progress = Callable[[str, int, int], None]
"""Told the file, its bytes so far and all of its bytes."""


def download_weights(
    networks: Sequence[str],
    *,
    mirror: str | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda name, done, total: None,
) -> list[Path]:
    """Bring published networks to this machine; what is there already is verified and stays.

    Args:
        networks: Official names, from :data:`~fastfold.evoformer.weights.published.PUBLISHED`.
        mirror: Where else to look: the address of the archive or of its folder, an archive on the disk, or a folder
            with the archive or its files.
        folder: Where to; the folder of all commands by default.
        say: Told what happens.
        progress: Told how far a file is.

    Returns:
        The files.

    Raises:
        ConfigError: The mirror is neither an address nor on the disk.
        NetworkError: The server cannot be reached or makes no sense; names the files and what to do without it.
        WeightsError: What arrived is no archive of parameters, or a file is not what was recorded.
        WriteError: The files cannot be written, or the disk has no room for them.
    """
    folder = prepare_output_directory(folder or weights_folder())
    files = [file_name(network) for network in networks]
    with _alone(folder, say):
        present = [name for name in files if (folder / name).is_file()]
        verify_recorded(folder, present)
        if present:
            say(f"there already, and verified: {', '.join(present)}")
        if missing := [name for name in files if name not in present]:
            write_atomic(folder / "LICENSE", LICENCE + "\n")
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
                    f"{error}. What has arrived is kept: run the same command again to continue. Missing: "
                    f"{listed(missing)}. {by_hand(missing, folder)}"
                ) from error
    return [folder / name for name in files]


@contextlib.contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Have the folder to ourselves; wait for another process that downloads into it."""
    path = folder / ".lock"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(FileLock(path, timeout=0)))
        except Timeout:
            say(f"another process downloads into {folder}; waiting for it")
            stack.enter_context(held(FileLock(path)))
        yield


def _partial(folder: Path, piece: Piece) -> Path:
    """Where a file lies until it is whole; the name tells archives apart."""
    return folder / f"{piece.name}.{input_hash(piece.version, piece.offset, piece.size)[:8]}.partial"


def _check_room(folder: Path, pieces: Sequence[Piece]) -> None:
    """See that the disk has room for what is still to come."""
    needed = _RESERVE
    for piece in pieces:
        if piece.size > SIZE_LIMIT:
            raise WeightsError(
                f"{piece.name} would take {piece.size / 2**30:.1f} GiB; weights take at most {SIZE_LIMIT >> 30} GiB. "
                "This is not the published archive: do not use it"
            )
        with contextlib.suppress(FileNotFoundError):
            needed -= _partial(folder, piece).stat().st_size
        needed += piece.size
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WriteError(
            f"{folder} has {free / 1e6:,.0f} MB free, and {needed / 1e6:,.0f} MB are needed for what is still to come; "
            "free some space, or set FASTFOLD_WEIGHTS to a folder on another disk, and run the same command again"
        )


def _bring(folder: Path, piece: Piece, say: Callable[[str], None], progress: Progress) -> None:
    """Write a file beside its place, look at it, and give it its name."""
    partial = _partial(folder, piece)
    try:
        for path in folder.glob(f"{piece.name}.*.partial"):
            if path != partial:  # of another archive
                path.unlink()
        with partial.open("ab") as file:
            done = file.tell()
            if done:
                say(f"{piece.name}: continues after {done:,} of {piece.size:,} bytes")
            piece.source.seek(piece.offset + done)
            progress(piece.name, done, piece.size)
            while done < piece.size:
                block = piece.source.read(min(_BLOCK, piece.size - done))
                if not block:
                    raise WeightsError(
                        f"the archive ends in the middle of {piece.name}: it is truncated; run the same command again, "
                        "or take it from another place (--mirror)"
                    )
                file.write(block)
                done += len(block)
                progress(piece.name, done, piece.size)
            file.flush()
            os.fsync(file.fileno())
        digest = _checked(partial, piece.name, read_sums(folder).get(piece.name))
        record_sums(folder, {piece.name: digest})
        os.replace(partial, folder / piece.name)
    except OSError as error:
        problem = output_error(partial, "write", error)
        raise WriteError(
            f"{problem}. What has arrived is kept: run the same command again to continue"
        ) from error


def _checked(partial: Path, name: str, recorded: str | None) -> str:
    """SHA-256 of what arrived, if it is a network's parameters, whole, and what was recorded before.

    Raises:
        WeightsError: It is not; it was removed.
    """
    try:
        with open_archive(partial) as archive:
            if damaged := archive.testzip():
                raise WeightsError(f"{damaged} in it is damaged")
        if weights_info(partial).multimer != ("multimer" in name):
            raise WeightsError("it is a network of another kind")
        digest = file_digest(partial)
        if recorded not in (None, digest):
            raise WeightsError(f"SHA-256 {digest[:16]}…, recorded in {SUMS} is {str(recorded)[:16]}…")
    except (WeightsError, *_DAMAGED) as error:
        partial.unlink(missing_ok=True)
        raise WeightsError(
            f"what arrived as {name} cannot be used ({error}) and was removed; run the same command again, or take it "
            "from another place (--mirror)"
        ) from None
    return digest
