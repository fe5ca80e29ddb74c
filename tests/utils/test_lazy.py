"""Names of a package that are loaded when they are first asked for."""

from __future__ import annotations

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
    module = ModuleType("lazy_package")
    monkeypatch.setitem(sys.modules, "lazy_package", module)
    module.__all__ = ["own", "value"]  # type: ignore[attr-defined]
    module.__getattr__, module.__dir__ = lazy_names(  # type: ignore[method-assign]
        "lazy_package", {"value": "lazy_origin", "gone": "lazy_origin"}
    )
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
