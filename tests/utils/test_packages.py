"""Packages that one feature needs: what is said where they are missing."""

from __future__ import annotations

import importlib.util

import pytest

from fastfold.errors import ConfigError
from fastfold.inference.error_messages import internal_error
from fastfold.utils.packages import is_installed, missing_module, require_package


def test_a_missing_package_is_named_with_the_feature_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"aligning needs the package kalign-python.*pip install kalign-python"
    ):
        require_package("kalign-python", "aligning")


def test_a_package_is_found_by_the_name_of_its_module() -> None:
    assert is_installed("numpy")
    assert not is_installed("no-such-package-of-ours")
    require_package("numpy", "arithmetic")


def test_an_import_that_fails_is_not_called_an_internal_error() -> None:
    """The package is named as the index names it, whichever part of it was imported."""
    error = ModuleNotFoundError("No module named 'kalign'", name="kalign.extra")
    assert "pip install kalign-python" in internal_error(error)
    assert "internal error" not in internal_error(error)


def test_a_missing_module_of_our_own_is_an_internal_error() -> None:
    error = ModuleNotFoundError("No module named 'fastfold.gone'", name="fastfold.gone")
    assert missing_module(error) is None
    assert "internal error" in internal_error(error)
