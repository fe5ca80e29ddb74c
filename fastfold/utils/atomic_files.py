"""Files that are either complete or absent: written to a temporary file in the same folder, then renamed."""

from __future__ import annotations

import contextlib
import errno
import functools
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
from fastfold.utils.option_fields import check_path

# O_BINARY exists on Windows only, where it prevents the conversion of line ends.
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
    errno.EISDIR: "a folder has the file's name; remove it or choose another output folder",
    errno.ENOENT: "the folder does not exist; create it or choose another output folder",
    errno.ENAMETOOLONG: "the name is too long for this file system; give the target a shorter name",
}
_LOCAL = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG}


def output_error(path: Path, action: str, error: OSError | ValueError) -> WriteError:
    """Return the user's error: ``cannot <action> '<path>'``, the reason, and what to do about it."""
    number = error.errno if isinstance(error, OSError) else None
    fallback = f"{getattr(error, 'strerror', None) or error}; choose another output folder"
    kind = PlaceError if number in _LOCAL else WriteError
    return kind(f"cannot {action} {str(path)!r}: {_REMEDIES.get(number or 0, fallback)}")


def temporary_name() -> str:
    """Return a name for a temporary file or folder, by which other processes recognise its owner.

    It does not depend on the final name, which may have the maximum length already.
    """
    return f".fastfold-{_system_id()}-{os.getpid()}-{secrets.token_hex(8)}.tmp"


def sweep_temporary(folder: str | os.PathLike[str]) -> int:
    """Remove temporary files of killed processes of this machine from a folder; return their number.

    Files of running processes and of other machines are kept.
    """
    swept = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if match is None or match[1] != _system_id() or _is_running(int(match[2])):
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
                swept += 1
    return swept


@functools.lru_cache(maxsize=1 << 12)
def _sweep_once(folder: Path) -> None:
    sweep_temporary(folder)


def _system_id() -> str:
    """Identify the machine or container that process numbers belong to, by 8 hexadecimal digits."""
    name = platform.node()
    with contextlib.suppress(OSError):
        name += os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(name.encode()):08x}"


def _is_running(process: int) -> bool:
    """Return True if a process of this number exists; always on Windows, where checking would end it."""
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
    """Yield an empty temporary file that replaces ``path`` at the end, or is removed after an error.

    An existing file is replaced, and kept after an error. The first file that a process writes to a folder sweeps it
    (:func:`sweep_temporary`).

    Raises:
        WriteError: The file cannot be written; names the path and what to do. No temporary file is left.
    """
    path = Path(path)
    temporary = path.parent / temporary_name()
    try:
        _sweep_once(path.parent.absolute())
        # Not tempfile, whose files only their owner may read: results follow the user's umask, even if the library
        # that writes them (such as safetensors) sets other permissions.
        descriptor = os.open(temporary, _CREATE, 0o666)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            os.close(descriptor)
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(mode)
            os.replace(temporary, path)
        except BaseException:  # also after an interrupt by the user
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise output_error(path, "write", error) from error
    sync_folder(path.parent)


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a file whose path always holds the old contents or all of the new ones.

    The data go to a temporary file in the same folder, to the disk, and then to the final name.

    Raises:
        WriteError: The file cannot be written; names the path and what to do. No temporary file is left.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, if the system supports that (not Windows)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def prepare_output_directory(path: str | os.PathLike[str]) -> Path:
    """Create the output folder and check that files can be created in it, before hours of work.

    Raises:
        ConfigError: The path is not one.
        WriteError: The folder cannot be created or written to; names the path and what to do.
    """
    check_path(path)
    path = Path(path)
    probe = path / temporary_name()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except (OSError, ValueError) as error:
        raise output_error(path, "use output folder", error) from error
    return path
