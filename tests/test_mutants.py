"""The program that puts wrong operators into the package makes them, and its tests notice them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mutant_runs, mutants
from fastfold.utils.units import parse_bytes
from tests.conftest import REPOSITORY

SOURCE = '''"""A module."""
LIMIT = 3


def share(a: int, b: int = 5) -> float:
    """Return a share."""
    if a < b and not b == 7:
        raise ValueError("no" + str(a + 1))
    return max(a, b) / (a + 2)
'''
CHANGES = {
    "condition to its opposite": "if not (a < b and (not b == 7)):",
    "And to Or": "if a < b or not b == 7:",
    "Lt to LtE": "if a <= b and (not b == 7):",
    "Eq to NotEq": "if a < b and (not b != 7):",
    "7 to 8": "if a < b and (not b == 8):",
    "max to min": "return min(a, b) / (a + 2)",
    "Div to Mult": "return max(a, b) * (a + 2)",
    "Add to Sub": "return max(a, b) / (a - 2)",
    "2 to 3": "return max(a, b) / (a + 3)",
}


def test_each_operator_of_a_function_is_changed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages, defaults and constants of modules stay."""
    (tmp_path / "m.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "REPOSITORY", tmp_path)
    found = mutants.mutants_of(tmp_path / "m.py")
    assert {one.change for one in found} == set(CHANGES)
    assert len(found) == len(CHANGES)
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for one in found:
        source = ast.unparse(mutants.tree_of(one, tmp_path)).splitlines()
        changed = [line.strip() for line, before in zip(source, plain, strict=True) if line != before]
        assert changed == [CHANGES[one.change]]


def test_tests_of_a_module_are_those_that_import_it_and_those_of_its_folder() -> None:
    found = mutants.tests_of("fastfold/utils/units.py")
    assert len(set(found)) == len(found)
    assert {path.name for path in (REPOSITORY / "tests/utils").glob("test_*.py")} <= {
        Path(test).name for test in found
    }
    assert found[0] == "tests/utils/test_units.py"
    assert "tests/inference/planning/test_fit.py" in found
    assert mutants.tests_of("fastfold/no_such_folder/no_such_module.py") == []


def _outer(values: list[int]) -> int:
    def inner(value: int) -> int:
        return value + 1

    return sum(inner(value) for value in values)


_NEEDS_QUALIFIED_NAMES = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="code has qualified names since Python 3.11"
)


@_NEEDS_QUALIFIED_NAMES
def test_a_fork_has_the_mutant() -> None:
    """Functions that exist already, and inner ones that they define, get the changed code of their file."""
    file = str(Path(__file__))
    trees = [ast.parse(Path(file).read_text()) for _ in range(2)]
    (add,) = (
        one for one in ast.walk(trees[1]) if isinstance(one, ast.BinOp) and ast.unparse(one) == "value + 1"
    )
    add.op = ast.Mult()
    right, wrong = (compile(tree, file, "exec", dont_inherit=True) for tree in trees)
    assert mutant_runs.changed_function(right, wrong) == "_outer.<locals>.inner"

    def compute() -> str:
        mutant_runs.replace_code(right, wrong)
        return str(_outer([2, 3]))

    assert (mutant_runs.in_fork(compute), _outer([2, 3])) == ("5", 7)
    assert mutant_runs.in_fork(lambda: None) is None
    assert mutant_runs.in_fork(lambda: os._exit(3)) == mutant_runs.DIED


@_NEEDS_QUALIFIED_NAMES
def test_calls_of_functions_of_the_package_are_recorded(tmp_path: Path) -> None:
    def called() -> str:
        calls = mutant_runs.FunctionCalls(REPOSITORY, tmp_path)
        calls.start()
        parse_bytes(3)
        names = calls.take()
        return json.dumps([sorted(names), sorted(calls.take() & names)])

    names, later = json.loads(mutant_runs.in_fork(called) or "")
    assert names[0] == "fastfold/utils/units.py::parse_bytes"
    assert later == []


@_NEEDS_QUALIFIED_NAMES
@pytest.mark.long
def test_a_wrong_operator_is_noticed(tmp_path: Path) -> None:
    """By the tests that call it in a fork, and by those of its module in a copy of the repository."""
    folder = tmp_path / "copy"
    used = (f"fastfold/utils/{name}.py" for name in ("units", "foreign_text", "text_files"))
    for name in ("fastfold/errors.py", *used, "tests/utils/test_units.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((REPOSITORY / name).read_text())
    for place in ("fastfold", "fastfold/utils"):
        (folder / place / "__init__.py").write_text("")
    tests = ["tests/utils/test_units.py"]
    assert mutants.run_tests(folder, tests)
    every = mutants.mutants_of(REPOSITORY / "fastfold/utils/units.py")
    mutant = next(one for one in every if one.change == "60 to 61")
    (folder / mutant.path).write_text(ast.unparse(mutants.tree_of(mutant, folder)))
    assert not mutants.run_tests(folder, tests)
    out = tmp_path / "mutants.json"
    command = [
        sys.executable,
        "benchmarks/mutants.py",
        "fastfold/utils/units.py",
        "--count",
        "3",
        "--seed",
        "1",
    ]
    command += ["--tests", *tests, "--out", str(out), "--record", str(tmp_path / "record")]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)
    rows = json.loads(out.read_text())
    assert len(rows) == 3
    assert any(str(row["noticed_by"]).startswith("tests/utils/test_units.py") for row in rows)
