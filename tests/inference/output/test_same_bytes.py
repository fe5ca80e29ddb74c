"""Equal inputs give equal files in another process: no date, and no order of a set, gets into them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.inference.relax import relax_file
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.pdb_writer import to_pdb
from tests.conftest import REPOSITORY
from tests.helpers.peptides import helix
from tests.helpers.structures import make_protein
from tests.inference.output.test_prediction import make_prediction
from tests.inference.relax.test_files import CPU, NAMES

SCRIPT = """
import pickle, sys
from fastfold.inference.relax import relax_file
from fastfold.protein.io.modelcif_writer import to_modelcif
folder, prediction, structure, config, protein, options = pickle.load(sys.stdin.buffer)
prediction.save(folder / "prediction", rank=1, settings={"a": 1})
relax_file(structure, folder / "relaxed", config)
print(to_modelcif(protein, **options), end="")
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.long
def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    """Files of a prediction, of a relaxation, and of a structure with all types of residues."""
    prediction = make_prediction("ACDEFGHIKL", "ACX", "ACX")
    structure = tmp_path / "x.pdb"
    structure.write_text(to_pdb(helix("AKLEW", "GSA"), names=NAMES))
    protein = make_protein("ACDEFGHIKLMNPQRSTVWYX", "ACX", "ACX")
    options: dict[str, Any] = {"entry_id": "target", "title": "A title", "software_version": "1.2.3"}
    options |= {"model_name": "model_1_ptm", "plddt": np.linspace(10, 90, len(protein)), "ptm": 0.5}
    here, there = tmp_path / "here", tmp_path / "there"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=pickle.dumps((there, prediction, structure, CPU, protein, options)),
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": "123", "TZ": "Pacific/Kiritimati"},
        stdout=subprocess.PIPE,
        check=True,
    )

    prediction.save(here / "prediction", rank=1, settings={"a": 1})
    written = contents(here / "prediction")
    assert len(written) == 6
    assert written == contents(there / "prediction")

    result, paths = relax_file(structure, here / "relaxed", CPU)
    assert result.relaxed, result.reason
    for kind in ("pdb", "cif"):
        assert paths[kind].read_bytes() == (there / "relaxed" / paths[kind].name).read_bytes()
    one, two = (json.loads((folder / "relaxed" / "x_relax.json").read_text()) for folder in (here, there))
    one.pop("seconds"), two.pop("seconds")
    assert one == two

    printed = done.stdout.decode()
    assert printed == to_modelcif(protein, **options)
    assert "data_target" in printed
