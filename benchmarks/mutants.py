"""Put wrong operators into the package one by one, and list those that the fast tests of their modules do not notice.

    python benchmarks/mutants.py --count 200 --out build/mutants.json fastfold/inference fastfold/products

Each mutant changes one operator of a function: a comparison, an arithmetic operator, ``and`` and ``or``, a condition, a
number, or one of two functions that are easily confused. The tests of a module are those that import it, and those of
its folder. A mutant that they pass survives.
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]

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
"""Processor time of each process of the tests, which a busy machine does not shorten, and the time for all."""
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
    """Draw mutants of folders of the package, as many of each folder, in a random order."""
    draws, chosen = random.Random(seed), []
    for number, folder in enumerate(folders):
        every = [
            mutant for file in sorted((REPOSITORY / folder).rglob("*.py")) for mutant in mutants_of(file)
        ]
        share = (count - len(chosen)) // (len(folders) - number)
        chosen += draws.sample(every, min(share, len(every)))
    draws.shuffle(chosen)
    return chosen


def source_of(mutant: Mutant, folder: Path) -> str:
    """Return the source of a file with a mutant."""
    tree = ast.parse((folder / mutant.path).read_text("utf-8"))
    for number, _ in enumerate(changes(tree)):
        if number == mutant.number:
            return ast.unparse(tree)
    raise ValueError(f"{mutant.path} has no change {mutant.number}")


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


def run_tests(folder: Path, tests: list[str]) -> tuple[bool, float]:
    """Run the fast tests in a copy of the repository; return True if they pass, and the seconds."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            timeout=_SECONDS,
            capture_output=True,
            check=False,
            preexec_fn=_limit_cpu,
        )
    except subprocess.TimeoutExpired:
        return False, time.monotonic() - start
    return done.returncode in (0, 5), time.monotonic() - start


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/mutants.json"))
    options = parser.parse_args()
    chosen = sample(options.folders, options.count, options.seed)
    killed, lines = 0, []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        shutil.copytree(
            REPOSITORY, folder, ignore=shutil.ignore_patterns(".venv", ".git", "build", "*_output")
        )
        shared = REPOSITORY.parent / "shared"
        if shared.is_dir():  # data of further tests, see tests/conftest.py
            (folder.parent / "shared").symlink_to(shared)
        for number, mutant in enumerate(chosen, 1):
            place, tests = folder / mutant.path, tests_of(mutant.path)
            before = place.read_text("utf-8")
            place.write_text(source_of(mutant, folder), "utf-8")
            passed, seconds = run_tests(folder, tests) if tests else (True, 0.0)
            place.write_text(before, "utf-8")
            killed += not passed
            lines.append({**mutant._asdict(), "killed": not passed, "seconds": round(seconds, 1)})
            print(
                f"{number}: {'killed' if not passed else 'SURVIVED'} {mutant.path}:{mutant.line}: {mutant.change}",
                flush=True,
            )
            options.out.write_text(json.dumps(lines, indent=1) + "\n")
    print(f"{killed} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
