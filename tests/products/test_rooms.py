"""Each product is a folder that the others do without: deleting it leaves folds, results, reports and commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastfold
from fastfold.cli.command import COMMANDS

PACKAGE = Path(fastfold.__file__).parent
PRODUCTS = sorted(path.name for path in (PACKAGE / "products").iterdir() if (path / "__init__.py").is_file())


def _copy_without(folder: Path, *products: str) -> Path:
    """Link the package's folders and files, all but some products; return the folder to import from."""
    package = folder / "fastfold"
    (package / "products").mkdir(parents=True)
    for path in PACKAGE.iterdir():
        if path.name not in ("products", "__pycache__"):
            (package / path.name).symlink_to(path)
    for path in (PACKAGE / "products").iterdir():
        if path.name not in (*products, "__pycache__"):
            (package / "products" / path.name).symlink_to(path)
    return folder


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("product", PRODUCTS)
def test_commands_are_listed_without_a_product(product: str, tmp_path: Path) -> None:
    done = _run(_copy_without(tmp_path, product), "-m", "fastfold", "--help")
    assert done.returncode == 0, done.stderr
    left = {name for name, module in COMMANDS.items() if f".{product}." not in module}
    assert len(left) < len(COMMANDS) or product in ("exporting", "notebook")
    listed = {
        line.split()[0] for line in done.stdout.partition("commands:")[2].splitlines() if line[4:5].strip()
    }
    assert left <= listed
    assert not listed & (set(COMMANDS) - left)


@pytest.mark.long
def test_all_else_is_imported_and_folds_without_any_product(tmp_path: Path) -> None:
    folder = _copy_without(tmp_path, *PRODUCTS)
    shutil.copy(PACKAGE.parent / "examples/proteins.fasta", folder / "all.fasta")
    text = (folder / "all.fasta").read_text().split(">")
    (folder / "one.fasta").write_text(f">{text[1]}")
    code = (
        "import importlib, pkgutil, fastfold\n"
        "from fastfold import cli, inference\n"
        "for part in (cli, inference):\n"
        "    for one in pkgutil.walk_packages(part.__path__, f'{part.__name__}.'):\n"
        "        if not one.name.endswith('__main__'):\n"
        "            importlib.import_module(one.name)\n"
        "print(fastfold.__path__[0])\n"
    )
    imported = _run(folder, "-c", code)
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.strip() == str(folder / "fastfold")
    folded = _run(folder, "-m", "fastfold", "infer", "one.fasta", "--out", "out", "--num-recycles", "0")
    assert folded.returncode == 0, folded.stderr
    assert (folder / "out" / "summary.tsv").is_file()
    page = _run(folder, "-m", "fastfold", "report", "out")
    assert page.returncode == 0, page.stderr
