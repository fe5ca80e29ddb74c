"""A table of faults over a command: what each leaves, what it says, and what the same command makes of it."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gemmi

from fastfold.cli import main
from tests.helpers.command_line import Outcome
from tests.helpers.faults.disk import Fault, Kind, install
from tests.helpers.forked import Forked

PLAIN: tuple[Kind, ...] = ("ENOSPC", "EIO", "SIGKILL")
_UNFINISHED = re.compile(r"\.(tmp|partial|unpacking|next|new)$")
"""Endings that tell a user, and a later run, that a file is not whole."""


@dataclass(frozen=True)
class Case:
    """A command whose writes fail.

    Attributes:
        name: Name of the command, and what distinguishes it from another of that name.
        prepare: Makes the inputs in a folder, once.
        arguments: Arguments of the command, from the folders of inputs and of results.
        start: Makes what lies in the folder of results before; by default nothing.
        again: Exit codes of the command that runs again, after one that may have finished.
        masked: Patterns of parts of files that hold a time; what their first group keeps stays.
        ignored: Pattern of names of files that hold a history of runs.
        environment: Variables of the command, from the folders of inputs and of results.
        run: Runs the command with a fault in a folder of a table.
    """

    name: str
    prepare: Callable[[Path], None]
    arguments: Callable[[Path, Path], Sequence[str | Path]]
    start: Callable[[Path, Path], None] = lambda inputs, out: None
    again: tuple[int, ...] = (0,)
    masked: tuple[str, ...] = ()
    ignored: str = r"(?!)"
    environment: Callable[[Path, Path], Mapping[str, str]] = lambda inputs, out: {}
    run: Callable[[Table, Fault], Outcome] = lambda table, fault: finish(start(table, fault))


@dataclass
class Table:
    """Runs of one case in a folder.

    Attributes:
        whole: Files of an undisturbed run, by name.
        steps: Steps of its writing.
        missed: Number of faults at steps that a run did not reach.
    """

    case: Case
    folder: Path
    whole: dict[str, bytes] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    missed: int = 0

    def __post_init__(self) -> None:
        self.inputs, self.work = self.folder / "inputs", self.folder / "work"
        self.out, self.log = self.work / "out", self.folder / "steps.log"
        self.inputs.mkdir(parents=True)
        self.case.prepare(self.inputs)
        self._restart()
        done = self._run(self.fault())
        assert done.code == 0, done.err
        self.steps, self.whole = self._steps(), self.contents()
        assert self.steps, "an undisturbed run writes nothing"

    def faults(self, number: int) -> Iterator[Fault]:
        """Yield faults of the disk at steps from the first to the last of an undisturbed run, and missing locks."""
        each = [(number - 1 - i + len(PLAIN) - 1) // len(PLAIN) for i in range(len(PLAIN))]
        for kind, count in zip(PLAIN, each, strict=True):
            for i in range(count):
                yield self.fault(kind, 1 + round(i * (len(self.steps) - 1) / max(1, count - 1)))
        yield self.fault("flock")

    def fault(self, kind: Kind = "none", step: int = 0) -> Fault:
        """Return a fault of this table's folder."""
        return Fault(str(self.work), str(self.log), kind, step)

    def problems(self, fault: Fault) -> list[str]:
        """Run the command with a fault and again without; return what is wrong, a line each."""
        self._restart()
        done = self._run(fault)
        at = self._steps()[max(0, fault.step - 1) : fault.step] or ["no step"]
        self.missed += fault.kind in PLAIN and at == ["no step"]
        found = [f"left half a file: {name}" for name in self._half_files()]
        if fault.kind != "SIGKILL" and done.code < 0:
            found.append(f"killed by signal {-done.code}")
        if done.code == 0:
            found += [f"succeeded, but {line}" for line in self._differences()]
        elif done.code > 0:
            found += _problems_of_message(done)
        again = self._run(self.fault())
        if again.code not in self.case.again:
            found.append(f"run again: exit code {again.code}: {again.err[-600:]}")
        else:
            found += [f"run again: {line}" for line in self._differences()]
        place = f"{self.case.name}: {fault.kind} at step {fault.step} of {len(self.steps)} ({at[0]})"
        return [f"{place}: {problem}" for problem in found] + [f"it said: {done.err[-600:]}"] * bool(found)

    def contents(self) -> dict[str, bytes]:
        """Return the files of results by their names, without times."""
        files = (path for path in sorted(self.work.rglob("*")) if path.is_file())
        found = {str(path.relative_to(self.work)): path for path in files}
        return {
            name: _masked(name, path.read_bytes(), self.case.masked)
            for name, path in found.items()
            if not re.search(rf"(^|/)\.?lock$|\.lock$|log\.txt$|{self.case.ignored}", name)
        }

    def _restart(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.case.start(self.inputs, self.out)

    def _run(self, fault: Fault) -> Outcome:
        for path in self.folder.glob(f"{self.log.name}*"):
            path.unlink()
        return self.case.run(self, fault)

    def _steps(self) -> list[str]:
        return self.fault().steps()

    def _half_files(self) -> Iterator[str]:
        for path in sorted(self.work.rglob("*")):
            hidden = any(_UNFINISHED.search(part) for part in path.relative_to(self.work).parts)
            name = str(path.relative_to(self.work))
            is_history = re.search(self.case.ignored, name)
            if path.is_file() and not hidden and not is_history and not is_whole(path):
                yield name

    def _differences(self) -> Iterator[str]:
        found = self.contents()
        for name in sorted(self.whole.keys() | found.keys()):
            if name not in found:
                yield f"{name} is missing"
            elif name not in self.whole:
                yield f"{name} is there, which an undisturbed run does not write"
            elif found[name] != self.whole[name]:
                yield f"{name} differs from an undisturbed run's, {_first_difference(self.whole[name], found[name])}"


def start(table: Table, fault: Fault, *more: str) -> Forked:
    """Start a table's command with a fault."""
    arguments = [str(one) for one in (*table.case.arguments(table.inputs, table.out), *more)]
    environment = fault.environment() | dict(table.case.environment(table.inputs, table.out))
    return Forked(run_faulty, arguments, env=environment)


def finish(process: Forked) -> Outcome:
    """Wait for the end of a command."""
    out, err = process.communicate()
    return Outcome(process.wait(), out, err)


def run_faulty(arguments: Sequence[str]) -> int:
    """Run ``fastfold`` with the fault of this process's environment."""
    install()
    return main(list(arguments))


def _problems_of_message(done: Outcome) -> Iterator[str]:
    text = done.err + done.out
    for word in ("Traceback (most", "bug in FastFold", "Warning:", "Error:"):
        if word in text:
            yield f"says {word!r}"
    errors = [line for line in done.err.splitlines() if re.match(r"(fastfold|error): ", line)]
    if len(errors) != 1:
        yield f"exit code {done.code} with {len(errors)} messages of an error"


def _first_difference(whole: bytes, found: bytes) -> str:
    pairs = enumerate(zip(whole, found, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(whole), len(found)))
    part = slice(max(0, at - 30), at + 30)
    return f"{whole[part]!r} there and {found[part]!r} here"


def _masked(name: str, content: bytes, patterns: Sequence[str]) -> bytes:
    for pattern in (r'("(?:seconds|peak_memory)": )[-+.e\d]+', *patterns):
        content = re.sub(pattern.encode(), rb"\1?", content)
    if name.endswith("summary.tsv"):
        rows = [line.split("\t") for line in content.decode().splitlines()]
        hidden = {i for i, title in enumerate(rows[0]) if title in ("seconds", "peak_memory")}
        content = "\n".join("\t".join(c for i, c in enumerate(r) if i not in hidden) for r in rows).encode()
    return content


def is_whole(path: Path) -> bool:
    """Return True if a file ends as files of its kind do; True for kinds that are not known."""
    try:
        return _CHECKS.get(path.suffix, lambda content: True)(path.read_bytes()) is not False
    except Exception:  # as many kinds of errors as readers
        return False


def _zip(content: bytes) -> bool:
    return zipfile.ZipFile(io.BytesIO(content)).testzip() is None


def _table(content: bytes) -> bool:
    lines = content.decode().split("\n")
    return lines[-1] == "" and len({line.count("\t") for line in lines[:-1]}) == 1


def _tensors(content: bytes) -> bool:
    from safetensors.torch import load

    return bool(load(content))


_CHECKS: dict[str, Callable[[bytes], Any]] = {
    ".json": lambda content: json.loads(content) is not None,
    ".pdb": lambda content: content.rstrip().endswith(b"END"),
    ".cif": lambda content: (
        content.endswith(b"\n") and gemmi.cif.read_string(content.decode()).sole_block() is not None
    ),
    ".png": lambda content: content.endswith(b"IEND\xaeB`\x82"),
    ".html": lambda content: content.rstrip().endswith(b"</html>"),
    ".npz": _zip,
    ".zip": _zip,
    ".pt": _zip,
    ".tsv": _table,
    ".csv": lambda content: content.endswith(b"\n"),
    ".md": lambda content: content.endswith(b"\n"),
    ".yaml": lambda content: content.endswith(b"\n"),
    ".fasta": lambda content: content.endswith(b"\n"),
    ".sto": lambda content: content.endswith(b"//\n"),
    ".a3m": lambda content: content.endswith(b"\n"),
    ".safetensors": _tensors,
    ".gz": lambda content: gzip.decompress(content) is not None,
}
