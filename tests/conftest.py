"""Shared helpers of the test suite, and Triton's interpreter where there is no GPU.

The interpreter of Triton 3.6 needs NumPy before 2.4, which no longer turns arrays of one element into numbers; that of
Triton 3.9 takes any.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.helpers import no_fsync as no_fsync
from tests.helpers.browser import Browser

# Triton reads the variable when its own functions are defined, so this stands before any test imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes depends on what else the machine does.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

REPOSITORY = Path(__file__).resolve().parent.parent

QUICK = (
    "data/msa",
    "data/test_fasta.py",
    "data/test_targets.py",
    "evoformer/test_mini_config.py",
    "evoformer/test_transition.py",
    "inference/output/test_results_folder.py",
    "inference/test_config.py",
    "inference/test_network_settings.py",
    "kernels/common/test_backend.py",
    "kernels/common/test_shapes.py",
    "kernels/ops/test_layer_norm.py",
    "memory/devices",
    "parallel/test_mesh.py",
    "protein/metrics",
    "protein/test_geometry.py",
    "protein/test_protein.py",
    "test_import_order.py",
    "test_positional_arguments.py",
    "test_public_names.py",
    "training/optim",
    "training/test_compose.py",
    "utils",
)
"""Files and folders of ``make test-quick``: about one for each part of the package, a second a test or less."""


@cache
def _is_quick(path: Path) -> bool:
    tests = REPOSITORY / "tests"
    if not path.is_relative_to(tests):
        return False
    place = path.relative_to(tests)
    return any(name.as_posix() in QUICK for name in (place, *place.parents))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m quick`` other files are not even imported, which would take most of the time."""
    if (
        config.getoption("markexpr") == "quick"
        and collection_path.is_file()
        and not _is_quick(collection_path)
    ):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests."""
    for item in items:
        takes_seconds = any(item.get_closest_marker(name) for name in ("long", "slow"))
        if _is_quick(item.path) and not takes_seconds:
            item.add_marker("quick")


# pytest's own setting, log_level, sets a level twelve times a test, and each time visits all loggers.
logging.getLogger().setLevel(logging.INFO)

# Modules and collected tests stay: a search for garbage among them, twice a second, finds none.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was collected to no search for garbage; speed up the interpreter of kernels where one is loaded.

    A search takes a tenth of the time then, and comes after ten times as many new objects as by default: a network
    has thousands.
    """
    gc.freeze()
    gc.set_threshold(7000)
    gc.enable()
    if "triton.runtime.interpreter" in sys.modules:
        importlib.import_module("tests.helpers.interpreter_patches")


# Later than pytest's own last collections, of which there are several.
atexit.register(gc.unfreeze)


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a process without Triton's interpreter; tests after it still run its functions in the interpreter."""
    pytest.importorskip("triton")  # imported without the variable, Triton would define its functions for GPUs
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def shared_dir() -> Path | None:
    """Folder with oracles and experimental data beside the checkout; None where there is none."""
    path = REPOSITORY.parent / "shared"
    return path if path.is_dir() else None


def require_shared(*parts: str) -> Path:
    """Path below the shared folder; skips the test with the reason where it does not exist."""
    base = shared_dir()
    if base is None or not base.joinpath(*parts).exists():
        pytest.skip(f"needs shared data {'/'.join(parts)}, which is not part of the project")
    return base.joinpath(*parts)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Call bytes by their argument: packed ones hold the time, and tests have one name in all processes."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measurements of this run out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache") / "least_work.json"
        patch.setattr("fastfold.evoformer.quantization.least_work.cache_file", lambda: cache)
        yield


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests, because its start takes longer than a page."""
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def browser(opened: Browser) -> Browser:
    """The browser with an empty page, and without what tests before left in it."""
    opened.reset()
    return opened
