"""The page of licences has the dependencies of ``pyproject.toml``, and says where a licence is not known."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from tests.conftest import REPOSITORY
from tests.packaging.project import project_table

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the script reads TOML by Python 3.11's reader"
)


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("make_licences", REPOSITORY / "docs" / "make_licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_exactly_the_dependencies(script: Any) -> None:
    lines = (REPOSITORY / "docs" / "licences.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]
    needed = script.dependencies(project_table())
    assert [(name, extras) for name, _, extras in rows] == [
        (name, ", ".join(extras)) for name, (_, extras) in needed.items()
    ]
    assert all(license for _, license, _ in rows)


def test_dependencies_are_those_of_all_platforms_and_extras(script: Any) -> None:
    project = {
        "dependencies": ["torch>=2", "psutil>=5; sys_platform != 'linux'"],
        "optional-dependencies": {"cuda": ["torch[cuda]"], "a": ["Scikit_Learn"], "b": ["scikit-learn>=1"]},
    }
    needed = script.dependencies(project)
    assert {name: extras for name, (_, extras) in needed.items()} == {
        "psutil": [],
        "scikit-learn": ["a", "b"],
        "torch": [],
    }
    assert [str(requirement) for requirement, _ in needed.values()] == [
        "psutil>=5",
        "Scikit_Learn",
        "torch>=2",
    ]
    assert list(needed) == sorted(map(canonicalize_name, needed))


@pytest.mark.parametrize(
    ("metadata", "license"),
    [
        ({"license_expression": "MIT", "license": "other"}, "MIT"),
        ({"classifier": ["License :: OSI Approved :: MIT License"], "license": "x" * 100}, "MIT License"),
        ({"classifier": ["License :: OSI Approved", "Topic :: X"], "license": "BSD\n like"}, "BSD like"),
        ({"license": "Copyright " * 10}, "unknown"),
        ({"classifier": ["Topic :: X"]}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_licences_are_those_that_a_release_states(
    script: Any, metadata: dict[str, Any], license: str
) -> None:
    assert script.license(metadata) == license
