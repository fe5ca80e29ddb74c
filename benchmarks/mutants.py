"""Put wrong operators into the package one by one, and list those that the fast tests of their modules do not notice.

    python benchmarks/mutants.py --count 200 --out build/mutants.json fastfold/inference fastfold/products

Each mutant changes one operator of a function: a comparison, an arithmetic operator, ``and`` and ``or``, a condition, a
number, or one of two functions that are easily confused. The tests that call the function run in a fork of one process
(`benchmarks/mutant_runs.py`). If no test calls it in its own process, the mutant is written into a copy of the
repository, where the tests that import its module run, and those of its folder. A mutant that they pass survives.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.mutant_runs import MutantRuns  # noqa: E402

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
_CONFUSED = {
    "min": "max",
    "max": "min",
    "argmin": "argmax",
    "argmax": "argmin",
    "any": "all",
    "all": "any",
    "sum": "mean",
    "mean": "sum",
    "floor": "ceil",
    "ceil": "floor",
    "log": "exp",
}
_CPU_SECONDS, _SECONDS = 240, 1200.0
"""Processor time and time of the tests in a copy."""
_TESTS = ["tests/cli", "tests/inference", "tests/parallel", "tests/products"]
_TESTS_AT_MOST = 12  #: Files that import a module


class Mutant(NamedTuple):
    """A wrong operator."""

    path: str  #: File below the repository
    line: int
    number: int  #: Number of the change among those of the file
    change: str  #: Old and new operator


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Change one operator of the functions after another in place, and yield its node with the change; undo it then.

    Docstrings, annotations, ``raise`` statements and decorators are left out.
    """
    for function in (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)):
        for node in _inside(function):
            yield from _changes_of(node)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a function, without those of inner functions and of messages."""
    for name, value in ast.iter_fields(node):
        if name in ("decorator_list", "returns", "annotation", "args") and isinstance(
            node, ast.FunctionDef | ast.AnnAssign
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(
                child, ast.FunctionDef | ast.Raise | ast.JoinedStr
            ):
                yield child
                yield from _inside(child)


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            node.ops = [_COMPARISONS[type(op)]()]
            yield node, f"{type(op).__name__} to {type(node.ops[0]).__name__}"
            node.ops = [op]
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC and not _is_text(node):
            node.op = _ARITHMETIC[type(op)]()
            yield node, f"{type(op).__name__} to {type(node.op).__name__}"
            node.op = op
        case ast.BoolOp(op=op):
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, f"{type(op).__name__} to {type(node.op).__name__}"
            node.op = op
        case ast.If(test=test) | ast.IfExp(test=test):
            node.test = ast.UnaryOp(ast.Not(), test)
            yield node, "condition to its opposite"
            node.test = test
        case ast.Constant(value=int() as value) if not isinstance(value, bool) and abs(value) < 1000:
            node.value = value + 1
            yield node, f"{value} to {value + 1}"
            node.value = value
        case ast.Attribute(attr=name) if name in _CONFUSED:
            node.attr = _CONFUSED[name]
            yield node, f"{name} to {node.attr}"
            node.attr = name
        case ast.Call(func=ast.Name(id=name) as function) if name in ("min", "max", "any", "all"):
            function.id = _CONFUSED[name]
            yield node, f"{name} to {function.id}"
            function.id = name


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def mutants_of(path: Path) -> list[Mutant]:
    """Return all mutants of a file of the package."""
    name = str(path.relative_to(REPOSITORY))
    tree = ast.parse(path.read_text("utf-8"))
    return [Mutant(name, node.lineno, i, what) for i, (node, what) in enumerate(changes(tree))]  # type: ignore[attr-defined]


def sample(folders: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """Draw mutants of folders or files of the package, as many of each, in a random order."""
    draws, chosen = random.Random(seed), list[Mutant]()
    for number, folder in enumerate(folders):
        place = REPOSITORY / folder
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        every = [mutant for file in files for mutant in mutants_of(file)]
        share = (count - len(chosen)) // (len(folders) - number)
        chosen += draws.sample(every, min(share, len(every)))
    draws.shuffle(chosen)
    return chosen


def tree_of(mutant: Mutant, folder: Path) -> ast.Module:
    """Return the syntax tree of a file with a mutant, in the lines of the file."""
    tree = ast.parse((folder / mutant.path).read_text("utf-8"))
    for number, _ in enumerate(changes(tree)):
        if number == mutant.number:
            return ast.fix_missing_locations(tree)
    raise ValueError(f"{mutant.path} has no change {mutant.number}")


def codes_of(mutant: Mutant) -> tuple[str, CodeType, CodeType]:
    """Return a mutant's path, and the right and the wrong code of its module."""
    file = str(REPOSITORY / mutant.path)
    trees = ast.parse(Path(file).read_text("utf-8")), tree_of(mutant, REPOSITORY)
    right, wrong = (compile(tree, file, "exec", dont_inherit=True) for tree in trees)
    return mutant.path, right, wrong


def tests_of(path: str) -> list[str]:
    """Return the files of tests that import a module, those of its name first, then the others of its folder."""
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    pattern = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    tests = [
        test.relative_to(REPOSITORY).as_posix()
        for test in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        if pattern.search(test.read_text("utf-8"))
    ]
    own = path.replace("fastfold/", "tests/", 1).rpartition("/")[0]
    near = sorted(tests, key=lambda test: (name not in test, not test.startswith(own)))[:_TESTS_AT_MOST]
    folder = [
        test.relative_to(REPOSITORY).as_posix() for test in sorted((REPOSITORY / own).glob("test_*.py"))
    ]
    return list(dict.fromkeys([*near, *folder]))


def _limit_cpu() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))


def run_tests(folder: Path, tests: list[str]) -> bool:
    """Run fast tests in a copy of the repository; return True if they pass in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # Without pipes and in a group, so that processes of the tests cannot outlive the limit.
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_limit_cpu,
    )
    try:
        return process.wait(_SECONDS) in (0, 5)
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_in_copy(mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, bool]]:
    """Yield mutants with True if the tests of their modules fail in a copy of the repository that has them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        shutil.copytree(
            REPOSITORY, folder, ignore=shutil.ignore_patterns(".venv", ".git", "build", "*_output")
        )
        shared = REPOSITORY.parent / "shared"
        if shared.is_dir():  # data of further tests, see tests/conftest.py
            (folder.parent / "shared").symlink_to(shared)
        for mutant in mutants:
            place = folder / mutant.path
            right = place.read_text("utf-8")
            place.write_text(ast.unparse(tree_of(mutant, folder)), "utf-8")
            yield mutant, not run_tests(folder, tests_of(mutant.path))
            place.write_text(right, "utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tests", nargs="+", default=_TESTS, help="files and folders of tests that run in forks"
    )
    parser.add_argument("--out", type=Path, default=Path("build/mutants.json"))
    parser.add_argument("--record", type=Path, default=Path("build/mutant_tests"))
    options = parser.parse_args()
    chosen = sample(options.folders, options.count, options.seed)
    noticed_by: dict[Mutant, str] = {}

    def report(mutant: Mutant, test: str | None) -> None:
        if test is not None:
            noticed_by[mutant] = test
        text = "SURVIVED" if test is None else f"noticed by {test}"
        print(f"{mutant.path}:{mutant.line}: {mutant.change}: {text}", flush=True)
        rows = [{**one._asdict(), "noticed_by": noticed_by.get(one)} for one in chosen]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")

    for folder in (options.out.parent, options.record):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        runs = MutantRuns(
            REPOSITORY,
            options.record.absolute(),
            (codes_of(one) for one in chosen),
            lambda number, test: report(chosen[number], test),
        )
        pytest.main(
            ["-q", "-p", "no:cacheprovider", f"--basetemp={name}/tests", *options.tests], plugins=[runs]
        )
    if runs.uncalled:
        for mutant, is_noticed in run_in_copy([chosen[number] for number in runs.uncalled]):
            report(mutant, "tests in a copy" if is_noticed else None)
    print(f"{len(noticed_by)} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
