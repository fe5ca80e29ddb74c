"""Record which functions each fast test calls, and run the tests of a mutant's function in a fork with the mutant.

pytest imports and collects once. Tests of a file, and those of a mutant, run in a fork of that process. A fork replaces
the code of the functions, so that constants of modules keep the right operator. Needs Python 3.11.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

_CPU_SECONDS, _SECONDS = 200, 600.0
"""Processor time and time of a fork. A mutant whose tests take longer is noticed, so that waiting for other programs
must not count."""
DIED = "a process that died or took too long"
_TEST_SECONDS = 25.0  #: Recorded time of the tests that run for a mutant


class FunctionCalls:
    """Functions of a package that this process and its ranks call, as ``path::qualified name``.

    Args:
        repository: Folder of the package.
        folder: Empty folder for the files of ranks.
    """

    def __init__(self, repository: Path, folder: Path) -> None:
        self._start, self._folder = f"{repository}/fastfold/", folder
        self._codes: dict[int, CodeType] = {}

    def start(self) -> None:
        """Record calls in all threads, and in ranks that `spawn_ranks` forks."""
        ranks: Any = importlib.import_module("tests.helpers.spawn_ranks")
        run_rank = ranks._child

        def record_rank(*arguments: Any) -> None:
            try:
                run_rank(*arguments)
            finally:
                (self._folder / str(os.getpid())).write_text("\n".join(self._names()))

        ranks._child = record_rank
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def take(self) -> set[str]:
        """Return the functions called since the last time."""
        names = set(self._names())
        self._codes.clear()
        for file in self._folder.iterdir():
            names |= set(file.read_text().splitlines())
            file.unlink()
        return names

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        self._codes[id(frame.f_code)] = frame.f_code

    def _names(self) -> Iterator[str]:
        for code in self._codes.copy().values():
            if code.co_filename.startswith(self._start):
                yield f"fastfold/{code.co_filename.removeprefix(self._start)}::{code.co_qualname}"


class _Reports:
    """Plugin that holds the outcomes of a test, and the functions that fixtures of its file call."""

    def __init__(self, calls: FunctionCalls | None = None) -> None:
        self._calls = calls
        self.outcomes: set[str] = set()
        self.of_fixtures: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        if self._calls:
            self.of_fixtures |= self._calls.take()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.add(report.outcome)


class MutantRuns:
    """pytest plugin that runs mutants in place of the collected tests.

    Args:
        repository: Folder of the package and its tests.
        record: Folder of recorded calls, a JSON file for each file of tests; those that lack are recorded.
        codes: Path below the repository, right and wrong code of a module for each mutant.
        report: Receives a mutant's number and the test that noticed it, None without one.
    """

    def __init__(
        self,
        repository: Path,
        record: Path,
        codes: Iterable[tuple[str, CodeType, CodeType]],
        report: Callable[[int, str | None], None],
    ) -> None:
        self._repository, self._record, self._codes, self._report = repository, record, codes, report
        self.uncalled: list[int] = []  #: Numbers of mutants whose functions no test calls in its process

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the mutants."""
        tests = self._recorded(session)
        items = {item.nodeid: item for item in session.items}
        for number, (path, right, wrong) in enumerate(self._codes):
            function = f"{path}::{changed_function(right, wrong)}"
            near = path.replace("fastfold/", "tests/", 1).rpartition("/")[0]
            calling = [(not name.startswith(near), seconds, name) for name, seconds in tests[function]]
            chosen, total = [], 0.0
            for _, seconds, name in sorted(calling):
                if name in items and total + seconds < _TEST_SECONDS:
                    chosen.append(items[name])
                    total += seconds
            if chosen:
                self._report(number, _noticed_by(session, chosen, right, wrong))
            else:
                self.uncalled.append(number)
        return True

    def _recorded(self, session: pytest.Session) -> dict[str, list[tuple[str, float]]]:
        """Return the tests that pass and call a function, with their seconds, by function; record changed files."""
        files: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            files[item.path].append(item)
        calling = defaultdict(list)
        places = [(self._record / f"{hash_of(file)}.json", file) for file in files]
        for place, file in places:
            if not place.exists():
                print(f"recording {file.relative_to(self._repository)}", flush=True)
                with tempfile.TemporaryDirectory() as folder:
                    calls = FunctionCalls(self._repository, Path(folder))
                    text = in_fork(partial(_record_calls, session, files[file], calls))
                place.write_text("{}" if text in (None, DIED) else text)
            for name, (seconds, functions) in json.loads(place.read_text()).items():
                for function in functions:
                    calling[function].append((name, seconds))
        return calling


def hash_of(file: Path) -> str:
    """Return a name for the record of a file of tests, another one if the file changes."""
    return hashlib.sha256(bytes(file) + file.read_bytes()).hexdigest()[:20]


def in_fork(compute: Callable[[], str | None]) -> str | None:
    """Return the result of a function of a forked process; :data:`DIED` if the process dies or takes too long."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if not process:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        try:
            with os.fdopen(writing, "w") as file:
                file.write(json.dumps(compute()))
        finally:
            os._exit(0)
    os.close(writing)
    timer = threading.Timer(_SECONDS, os.killpg, (process, signal.SIGKILL))
    timer.start()
    with os.fdopen(reading) as file:
        text = file.read()
    timer.cancel()
    os.waitpid(process, 0)
    return json.loads(text) if text else DIED


def _prepare(session: pytest.Session, plugin: object) -> None:
    """Fork ranks from this process, which has the mutant, and report to a plugin alone."""
    ranks: Any = importlib.import_module("tests.helpers.spawn_ranks")
    ranks.CONTEXT = multiprocessing.get_context("fork")
    manager = session.config.pluginmanager
    manager.unregister(name="terminalreporter")
    manager.register(plugin)


def _record_calls(session: pytest.Session, items: Sequence[pytest.Item], calls: FunctionCalls) -> str:
    """Run the tests of a file; return seconds and functions of those that pass, as JSON.

    Each function that a fixture calls counts for all tests of the file, which may share the fixture.
    """
    reports = _Reports(calls)
    _prepare(session, reports)
    calls.start()
    tests = {}
    for item, following in zip(items, [*items[1:], None], strict=True):
        reports.outcomes, start = set(), sum(os.times()[:4])
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        functions = calls.take()
        if reports.outcomes == {"passed"}:
            tests[item.nodeid] = (sum(os.times()[:4]) - start, functions)
    return json.dumps(
        {
            name: (round(seconds, 2), sorted(functions | reports.of_fixtures))
            for name, (seconds, functions) in tests.items()
        }
    )


def _noticed_by(
    session: pytest.Session, items: list[pytest.Item], right: CodeType, wrong: CodeType
) -> str | None:
    """Return the first test that fails with a mutant and passes without it, None if all pass."""
    while (name := in_fork(partial(_first_failure, session, items, right, wrong))) not in (None, DIED):
        failed = [one for one in items if one.nodeid == name]
        if in_fork(partial(_first_failure, session, failed, right, right)) is None:
            break
        items = [one for one in items if one.nodeid != name]
    return name


def _first_failure(
    session: pytest.Session, items: Sequence[pytest.Item], right: CodeType, wrong: CodeType
) -> str | None:
    reports = _Reports()
    _prepare(session, reports)
    replace_code(right, wrong)
    for item, following in zip(items, [*items[1:], None], strict=True):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if "failed" in reports.outcomes:
            return item.nodeid
    return None


def _codes_below(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_below(constant)


def _changed(right: CodeType, wrong: CodeType) -> dict[CodeType, CodeType]:
    pairs = zip(_codes_below(right), _codes_below(wrong), strict=True)
    return {old: new for old, new in pairs if old != new}


def changed_function(right: CodeType, wrong: CodeType) -> str:
    """Return the qualified name of the innermost function whose code differs between two forms of a module."""
    return max((code.co_qualname for code in _changed(right, wrong)), key=len, default="")


def replace_code(right: CodeType, wrong: CodeType) -> None:
    """Give the functions of a module that exist their code of its other form."""
    changed = _changed(right, wrong)
    gc.unfreeze()
    for function in [one for one in gc.get_objects() if type(one) is FunctionType]:
        code = function.__code__
        if code.co_filename == right.co_filename and code in changed:
            function.__code__ = changed[code]
