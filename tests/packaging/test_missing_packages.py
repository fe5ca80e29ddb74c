"""A fold needs none of the packages that only one feature uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.helpers.blocked_packages import run_without
from tests.helpers.forked import Forked

OPTIONAL = ("kalign", "openmm", "pdbfixer", "pyhmmer", "matplotlib", "molstar_cli", "triton", "psutil")


def _command(module: str, *arguments: str) -> tuple[int | None, str]:
    process = Forked(run_without, module, *arguments)
    out, err = process.communicate()
    return process.returncode, out + err


@pytest.fixture
def fasta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("a.fasta").write_text(">a\nMKTAYIAKQRQISFVKSHFS\n")
    return "a.fasta"


@pytest.mark.long
def test_infer_folds_without_matplotlib_and_says_that_no_plots_are_drawn(fasta: str) -> None:
    code, said = _command("matplotlib", "infer", fasta, "--out", "out")
    assert code == 0, said
    assert "no plots are drawn" in said
    assert "pip install matplotlib" in said
    assert list(Path("out").glob("a_rank_001_*.pdb"))
    assert not list(Path("out").glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("module", OPTIONAL)
def test_infer_folds_without(module: str, fasta: str) -> None:
    """In a new interpreter, where no module has seen the package."""
    command = [sys.executable, "-m", "tests.helpers.blocked_packages", module, "infer", fasta, "--out", "out"]
    folded = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
    )
    assert folded.returncode == 0, folded.stderr
    assert list(Path("out").glob("a_rank_001_*.pdb"))
    assert Path("out/report.html").is_file()


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("pyhmmer", ["--db", "a.fasta"]),
        ("openmm", ["--relax", "best"]),
        ("pdbfixer", ["--relax", "best"]),
    ],
)
def test_a_feature_names_the_package_it_lacks(module: str, arguments: list[str], fasta: str) -> None:
    code, said = _command(module, "infer", fasta, "--out", "out", *arguments)
    assert code == 2
    assert f"pip install {module}" in said
    assert "internal error" not in said


WINDOWS_LACKS = (
    "fork",
    "register_at_fork",
    "posix_fadvise",
    "posix_fallocate",
    "pwritev",
    "preadv",
    "killpg",
)


def import_without_calls() -> int:
    """Import the package again without the calls, in a process that ends afterwards."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastfold"]:
        del sys.modules[name]
    for name in WINDOWS_LACKS:
        delattr(os, name)
    import fastfold.cli
    import fastfold.inference.runner
    import fastfold.kernels
    import fastfold.memory  # noqa: F401

    return 0


def test_the_package_is_imported_without_calls_that_windows_lacks() -> None:
    process = Forked(import_without_calls)
    _, err = process.communicate()
    assert process.returncode == 0, err
