"""Asking for help is instant, and PyTorch is loaded in the way that suits a shared machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastfold.inference.folding.background import PLOTS
from tests.conftest import REPOSITORY

HEAVY = (
    "torch",
    "numpy",
    "matplotlib",
    "Bio",
    "gemmi",
    "modelcif",
    "ml_collections",
    "safetensors",
    "rich",
    "openmm",
)


def python(code: str, **environment: str) -> str:
    """What some code prints in a fresh interpreter."""
    env = {name: value for name, value in os.environ.items() if "OMP_" not in name} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=REPOSITORY, env=env, check=True, capture_output=True, text=True).stdout


def test_help_loads_nothing_heavy():
    """In one interpreter, which takes longer to start than all helps."""
    commands = [
        ["--help"],
        ["infer", "--help"],
        ["design", "--help"],
        ["relax", "--help"],
        ["serve", "--help"],
        ["weights", "info", "--help"],
        [],
    ]
    code = f"""
import sys
from fastfold.cli import main
for arguments in {commands}:
    try: main(arguments)
    except SystemExit: pass
    print("loaded:", *(name for name in {HEAVY} if name in sys.modules))
"""
    loaded = [line for line in python(code).splitlines() if line.startswith("loaded:")]
    assert loaded == ["loaded:"] * len(commands)


def test_importing_the_package_loads_nothing_heavy():
    code = f"import sys, fastfold; dir(fastfold); print(*(name for name in {HEAVY} if name in sys.modules))"
    assert python(code).strip() == ""


def test_help_is_there_within_half_a_second():
    """One of five times, so that a busy machine does not count."""

    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "fastfold", "--help"], cwd=REPOSITORY, check=True, capture_output=True
        )
        return time.perf_counter() - start

    assert any(seconds() < 0.5 for _ in range(5))


def test_a_command_ends_with_its_code_and_exit_handlers_without_freeing_modules():
    code = """
import atexit
from fastfold.cli.process import exit_with

class Kept:
    def __del__(self):
        print("freed")

def run():
    atexit.register(print, "handled")
    return 3

kept = Kept()
exit_with(run)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (3, ["handled"], "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "10000 17"),
        ({"GOMP_SPINCOUNT": "7", "OPENBLAS_THREAD_TIMEOUT": "20"}, "7 20"),
        ({"OMP_WAIT_POLICY": "active"}, "None 17"),
    ],
)
def test_waits_of_threads_are_shortened_before_pytorch_is_loaded_unless_the_user_decides(given, expected):
    code = (
        "import os, sys\n"
        "from fastfold.cli import main\n"
        "from fastfold.cli.commands import infer\n"
        "names = 'GOMP_SPINCOUNT', 'OPENBLAS_THREAD_TIMEOUT'\n"
        "def run(options):\n"
        "    print({'torch', 'numpy'} & set(sys.modules), *map(os.environ.get, names))\n"
        "    return 0\n"
        "infer.run_infer = run\n"
        "main(['infer', 'a.fasta', '--out', 'x'])"
    )
    assert python(code, **given).strip() == f"set() {expected}"


@pytest.mark.long
def test_a_fold_prints_before_pytorch_is_loaded_and_loads_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">a\nMKTAYIAKQR\n")
    code = f"""
import io, sys

class Stream(io.StringIO):
    def write(self, text):
        first.append("torch" in sys.modules)
        return len(text)

first, sys.stderr = [], Stream()
from fastfold.cli import main
main(["infer", r"{tmp_path / "a.fasta"}", "--out", r"{tmp_path / "out"}", "--no-plots"])
heavy = ("torch._dynamo", "torch.distributed.tensor", "sympy", "matplotlib", "openmm")
print(first[0], [name for name in heavy if name in sys.modules])
"""
    assert python(code).splitlines()[-1] == "False []"


def test_pages_and_plots_need_no_pytorch() -> None:
    """``fastfold report`` makes the page, and a process beside each fold draws plots and packs the viewer."""
    modules = [*PLOTS, "fastfold.inference.folding.background", "fastfold.inference.report.molstar"]
    code = f"import sys, importlib; [*map(importlib.import_module, {modules})]; print('torch' in sys.modules)"
    assert python(code).strip() == "False"
