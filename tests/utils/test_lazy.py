"""Names of a package that are loaded when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fastfold.utils.lazy import lazy_names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package ``lazy_package`` whose ``value`` lies in a module that notes each time it is run."""
    (tmp_path / "lazy_origin.py").write_text("import sys\nsys.lazy_runs.append(1)\nvalue = object()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "lazy_runs", [], raising=False)
    monkeypatch.delitem(sys.modules, "lazy_origin", raising=False)
    (tmp_path / "lazy_package").mkdir()
    (tmp_path / "lazy_package" / "__init__.py").write_text(
        f"from typing import TYPE_CHECKING\nfrom {lazy_names.__module__} import lazy_names\n"
        "if TYPE_CHECKING:\n    from lazy_origin import gone, value\n"
        "__all__ = ['own', 'value']\n__getattr__, __dir__ = lazy_names(__name__)\n"
    )
    monkeypatch.delitem(sys.modules, "lazy_package", raising=False)
    module = importlib.import_module("lazy_package")
    return module


def test_a_name_is_loaded_once_and_then_an_attribute_like_others(package: ModuleType) -> None:
    assert sys.lazy_runs == []  # type: ignore[attr-defined]
    assert "value" not in vars(package)
    first = package.value
    assert first is sys.modules["lazy_origin"].value
    assert vars(package)["value"] is first
    sys.modules["lazy_origin"].value = "another"
    assert package.value is first


def test_dir_lists_what_is_exported_and_what_is_lazy_and_loads_nothing(package: ModuleType) -> None:
    assert dir(package) == ["gone", "own", "value"]
    assert sys.lazy_runs == []  # type: ignore[attr-defined]


def test_other_names_are_attribute_errors(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'other'"):
        _ = package.other
    with pytest.raises(AttributeError, match="'lazy_origin' has no attribute 'gone'"):
        _ = package.gone
    assert not hasattr(package, "other")
