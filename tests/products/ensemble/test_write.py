"""Files of an ensemble."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.errors import ConfigError
from fastfold.products.ensemble.write import write_ensembles
from fastfold.protein.io.read import read_structure
from tests.products.ensemble.conftest import FAR

# Not imported by the process that runs other tests.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


def test_files_have_the_numbers_of_the_analysis(two_states: Path, tmp_path: Path):
    folder = Path(shutil.copytree(two_states, tmp_path / "results"))
    reference = next(folder.glob("*rank_001*.cif"))
    lines: list[str] = []
    (found,) = write_ensembles(folder, references=[reference], say=lines.append).values()
    assert lines[0].startswith("helices: 7 samples, 2 clusters (5, 2), TM-score of pairs 0.")
    names = {path.name.removeprefix("helices_ensemble") for path in folder.glob("*_ensemble*")}
    pictures = {f"_{name}.png" for name in ("pairs", "landscape", "residues", "states")}
    assert names == {".json", ".tsv", ".pdb", "_residues.tsv"} | pictures
    values = json.loads((folder / "helices_ensemble.json").read_text())
    assert values["clusters"] == found.clusters.tolist()
    assert np.allclose(values["tm_score"], found.tm_score, atol=1e-4)
    head, *rows = [line.split("\t") for line in (folder / "helices_ensemble.tsv").read_text().splitlines()]
    table = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["cluster"] for row in table] == ["2" if k in FAR else "1" for k in range(7)]
    assert [row["sample"] for row in table] == [f"columns_{k:03d}" for k in range(1, 8)]
    assert table[0][f"tm_score {reference.name}"] == "1.0000"
    residues = [
        line.split("\t") for line in (folder / "helices_ensemble_residues.tsv").read_text().splitlines()
    ]
    assert [residue[1] for residue in residues[1:]] == [*map(str, range(1, 31)), *map(str, range(1, 21))]
    assert float(residues[1][3]) == pytest.approx(found.fluctuation[0], abs=1e-3)
    text = (folder / "helices_ensemble.pdb").read_text()
    assert text.count("\nMODEL ") == text.count("\nENDMDL") == 2
    first = read_structure(folder / "helices_ensemble.pdb").chains
    # Names are those of the predictions' own files.
    predicted = read_structure(next(folder.glob("*rank_001*.pdb"))).chains
    assert [(one.chain_id, one.author_numbers) for one in first] == [
        (one.chain_id, one.author_numbers) for one in predicted
    ]
    assert np.abs(first[0].positions[:, 1] - found.superposed[found.representatives[0], :30]).max() < 2e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"similarity": 0.0}, "similarity= must be over 0 and at most 1, found 0"),
        ({"num_clusters": 8}, "clusters=8: helices has only 7 predictions"),
        (
            {"references": [Path("a/x.pdb"), Path("b/x.pdb")]},
            "reference=: two files are named x.pdb; rename one",
        ),
    ],
)
def test_a_mistake_is_named(two_states: Path, settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        write_ensembles(two_states, **settings)
