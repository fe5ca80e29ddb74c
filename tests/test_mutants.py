"""The program that puts wrong operators into the package makes them, and its tests notice them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import mutants
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
        source = mutants.source_of(one, tmp_path).splitlines()
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


@pytest.mark.long
def test_a_wrong_operator_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    for name in ("fastfold/errors.py", "fastfold/utils/units.py", "tests/utils/test_units.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((REPOSITORY / name).read_text())
    for place in ("fastfold", "fastfold/utils"):
        (folder / place / "__init__.py").write_text("")
    tests = ["tests/utils/test_units.py"]
    assert mutants.run_tests(folder, tests)[0]
    mutant = next(
        one for one in mutants.mutants_of(REPOSITORY / "fastfold/utils/units.py") if one.change == "60 to 61"
    )
    (folder / mutant.path).write_text(mutants.source_of(mutant, folder))
    assert not mutants.run_tests(folder, tests)[0]
