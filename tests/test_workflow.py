"""The Snakemake workflow searches, folds and reports, and continues where it stopped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.helpers.sequence_databases import queries, write_database

WORKFLOW = REPOSITORY / "examples" / "snakemake"

SNAKEMAKE = shutil.which("snakemake") or shutil.which(
    REPOSITORY / "build" / "snakemake" / "bin" / "snakemake"
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(SNAKEMAKE is None, reason="needs Snakemake; 'make snakemake' installs it"),
]


def run(folder: Path) -> str:
    done = subprocess.run(
        [str(SNAKEMAKE), "--cores", "2", "--snakefile", str(WORKFLOW / "Snakefile")],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_proteins_are_searched_and_folded(tmp_path: Path) -> None:
    (tmp_path / "proteins").mkdir()
    proteins = queries(2, 30)
    for name, sequence in proteins.items():
        (tmp_path / "proteins" / f"{name}.fasta").write_text(f">{name}\n{sequence}\n")
    database = write_database(tmp_path / "uniref90.fasta", proteins)
    config = yaml.safe_load((WORKFLOW / "config.yaml").read_text())
    config |= {
        "command": f"{sys.executable} -m fastfold",
        "search": f"--db {database}",
        "fold": "--num-recycles 0 --no-plots",
        "search_threads": 1,
        "fold_threads": 1,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run(tmp_path)
    assert (tmp_path / "results" / "report.html").is_file()
    for name in proteins:
        assert (tmp_path / "alignments" / name / name / "uniref90_hits.sto").is_file()
        assert list((tmp_path / "results").glob(f"{name}_rank_001_*.cif"))
    assert "Nothing to be done" in run(tmp_path)
    for path in ("folded/q0.done", "results/report.html"):
        (tmp_path / path).unlink()
    again = run(tmp_path)
    assert "rule fold" in again
    assert "rule search" not in again
