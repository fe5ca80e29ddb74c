"""Packages that one feature needs and a fold does not: checked where the feature begins."""

from __future__ import annotations

import importlib.util

from fastfold.errors import ConfigError

MODULES = {"kalign-python": "kalign", "molstar-cli": "molstar_cli"}
"""Modules of packages whose names differ from their module's."""


def is_installed(package: str) -> bool:
    """Return whether a package of the index can be imported; it is not imported."""
    return importlib.util.find_spec(MODULES.get(package, package)) is not None


def require_package(package: str, feature: str) -> None:
    """Check that a package is installed.

    Args:
        package: Its name on the package index.
        feature: The feature that needs it, as the beginning of a sentence.

    Raises:
        ConfigError: It is not installed; the message says how to get it.
    """
    if not is_installed(package):
        raise ConfigError(f"{feature} needs {missing(package)}")


def missing(package: str) -> str:
    """Return the words that name a package that is not installed and say how to get it."""
    return (
        f"the package {package}, which is not installed; install it with: pip install {package} "
        "(docs/install.md says which platforms have it)"
    )


def missing_module(error: ModuleNotFoundError) -> str | None:
    """Return a message for an import that failed, or None for a module of FastFold itself."""
    module = (error.name or "").partition(".")[0]
    if not module or module == "fastfold":
        return None
    package = next((name for name, own in MODULES.items() if own == module), module)
    return f"this needs {missing(package)}"
