"""Optional packages of single features, checked at the start of the feature."""

from __future__ import annotations

import importlib.util

from fastfold.errors import ConfigError

MODULES = {"kalign-python": "kalign", "molstar-cli": "molstar_cli", "scikit-learn": "sklearn"}
"""Modules of packages that are named differently."""


def is_installed(package: str) -> bool:
    """Return True if a package of the index can be imported; it is not imported."""
    return importlib.util.find_spec(MODULES.get(package, package)) is not None


def require_package(package: str, feature: str) -> None:
    """Check that a package is installed; ``feature``, which needs it, begins a sentence.

    Raises:
        ConfigError: The package is not installed; the message has the command to install it.
    """
    if not is_installed(package):
        raise ConfigError(f"{feature} needs {missing(package)}")


def missing(package: str) -> str:
    """Return the name of a package that is not installed, with the command to install it."""
    return (
        f"the package {package}, which is not installed; install it with: pip install {package} "
        "(docs/install.md says which platforms have it)"
    )


def missing_module(error: ModuleNotFoundError) -> str | None:
    """Return a message for a failed import, or None for a module of FastFold."""
    module = (error.name or "").partition(".")[0]
    if not module or module == "fastfold":
        return None
    package = next((name for name, own in MODULES.items() if own == module), module)
    return f"this needs {missing(package)}"
