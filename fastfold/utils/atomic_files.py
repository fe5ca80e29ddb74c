"""Files that are either whole or not there: written next to their place, then renamed into it."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from fastfold.errors import PlaceError, WriteError

# O_BINARY exists on Windows only, where line ends would be changed without it.
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_TEMPORARY = re.compile(r"\.fastfold-([0-9a-f]{8})-(\d{1,10})-[0-9a-f]{16}\.tmp")
_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or choose another output folder",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another output folder",
    errno.EFBIG: "the file is larger than this system allows; choose another output folder",
    errno.EROFS: "the file system is read-only; choose another output folder",
    errno.EACCES: "permission denied; choose an output folder that you may write to",
    errno.EPERM: "not permitted; choose an output folder that you may write to",
    errno.ENOTDIR: "part of the path is a file, not a folder; choose another output folder",
    errno.EEXIST: "it is a file, not a folder; remove it or choose another output folder",
    errno.EISDIR: "a folder stands where the file belongs; remove it or choose another output folder",
    errno.ENOENT: "the folder does not exist; create it or choose another output folder",
    errno.ENAMETOOLONG: "the name is too long for this file system; give the target a shorter name",
}
_LOCAL = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG}


def output_error(path: Path, action: str, error: OSError | ValueError) -> WriteError:
    """The error for a person: ``cannot <action> '<path>'``, why, and what to do about it."""
    number = error.errno if isinstance(error, OSError) else None
    fallback = f"{getattr(error, 'strerror', None) or error}; choose another output folder"
    kind = PlaceError if number in _LOCAL else WriteError
    return kind(f"cannot {action} {str(path)!r}: {_REMEDIES.get(number or 0, fallback)}")


def temporary_name() -> str:
    """A name for a temporary file or folder of this process, by which others see whose it is.

    It does not depend on the final name, which may be as long as names can be.
    """
    return f".fastfold-{_system()}-{os.getpid()}-{secrets.token_hex(8)}.tmp"


def sweep_temporary(folder: str | os.PathLike[str]) -> int:
    """Remove what killed processes of this machine left in a folder under temporary names; returns how many.

    Files of processes that still run, and those of other machines, stay.
    """
    swept = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if found is None or found[1] != _system() or _runs(int(found[2])):
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
                swept += 1
    return swept


def _system() -> str:
    """This machine, or this container of it, where numbers of processes mean something: 8 hexadecimal digits."""
    name = platform.node()
    with contextlib.suppress(OSError):
        name += os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(name.encode()):08x}"


def _runs(process: int) -> bool:
    """Whether there is a process of this number; on Windows, where asking would end it, always."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file in the folder of ``path`` that takes its place at the end, or is removed after an error.

    Args:
        path: Where the file shall be; what is there is replaced, and stays if anything goes wrong.

    Yields:
        The path to write to; the file is there and empty.

    Raises:
        WriteError: The file cannot be written; names the path and what to do. No temporary file is left.
    """
    path = Path(path)
    temporary = path.parent / temporary_name()
    try:
        # Not tempfile, whose files nobody but their owner may read: results follow the user's umask, also if what
        # writes them (as the safetensors library) has its own idea.
        descriptor = os.open(temporary, _CREATE, 0o666)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            os.close(descriptor)
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(mode)
            os.replace(temporary, path)
        except BaseException:  # an interrupt by the user leaves nothing behind either
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise output_error(path, "write", error) from error
    _sync_folder(path.parent)


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Writes a file so that its path holds the old contents or all of the new ones, whatever happens.

    The data go to a temporary file in the same folder, to the disk, and then under the final name.

    Args:
        path: Where the file shall be; what is there is replaced.
        data: Its contents; text is encoded as UTF-8.

    Raises:
        WriteError: The file cannot be written; names the path and what to do. No temporary file is left.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where the system can do that (not on Windows)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def prepare_output_directory(path: str | os.PathLike[str]) -> Path:
    """Creates the output folder and tries that files can be made in it, before hours of work are spent.

    Args:
        path: The folder; parents are created as needed.

    Returns:
        The same path.

    Raises:
        WriteError: The folder cannot be created or written to; names the path and what to do.
    """
    path = Path(path)
    probe = path / temporary_name()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except (OSError, ValueError) as error:
        raise output_error(path, "use output folder", error) from error
    return path
