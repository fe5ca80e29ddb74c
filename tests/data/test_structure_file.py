"""Reading structure files: the experimental collection, and what cannot be read."""

from __future__ import annotations

import csv

import numpy as np

from fastfold.data.structure_file import read_structure
from tests.conftest import require_shared


def test_collection_is_read_with_its_sequences() -> None:
    """Every 50th chain of the collection gives the sequence of its index, apart from modified residues."""
    folder = require_shared("data", "structures")
    with (folder / "index.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))[::50]
    for row in rows:
        structure = read_structure(folder / row["split"] / f"{row['name']}.pdb.gz")
        (chain,) = structure.chains
        assert (structure.name, chain.chain_id) == (row["name"], row["chain"])
        assert len(chain) == len(row["sequence"])
        assert all(a == b for a, b in zip(chain.sequence, row["sequence"], strict=True) if b != "X")
        assert np.all(np.diff(chain.residue_index) > 0)
        assert np.isfinite(chain.positions).all()
        assert not chain.positions[chain.mask == 0].any()
