"""Coverage counts what each residue is covered by, once, by identity to the query."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastfold.data.msa import sampling
from fastfold.data.msa.msa import Msa
from fastfold.data.msa.sampling import alignment_coverage


def msa(*rows: str) -> Msa:
    return Msa(rows, np.zeros((len(rows), len(rows[0])), np.int32), rows)


def test_rows_are_counted_once_by_residue_and_identity() -> None:
    unpaired = msa("MKTAY", "MKTA-", "--TAY", "WWWW-")
    paired = msa("MKTAY", "MKTA-", "MK---")
    found = alignment_coverage([([unpaired], [paired])], lengths=[5])
    assert found["rows"] == [5]
    assert found["depth"] == [4, 4, 4, 4, 2]
    # 1.0; 0.8 (an edge); 0.6 (an edge); 0.0; 0.4 (an edge)
    assert found["rows_by_identity"] == [[1, 0, 1, 1, 2]]
    assert found["depth_by_identity"] == [
        [1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1],
        [2, 2, 2, 2, 1],
    ]
    assert json.loads(json.dumps(found)) == found


def test_chains_stand_one_after_the_other_and_one_without_alignments_covers_itself() -> None:
    found = alignment_coverage([([], []), ([msa("GS", "G-")], [])], lengths=[3, 2])
    assert found["chain_lengths"] == [3, 2]
    assert found["rows"] == [1, 2]
    assert found["depth"] == [1, 1, 1, 2, 1]
    assert found["rows_by_identity"][0] == [0, 0, 0, 0, 1]


def test_blocks_of_rows_give_the_same(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    rows = ["".join(row) for row in rng.choice(list("ACD-"), (50, 12), p=[0.5, 0.2, 0.1, 0.2])]
    alignments = [([msa("A" * 12, *rows)], [])]
    whole = alignment_coverage(alignments, lengths=[12])
    monkeypatch.setattr(sampling, "_BLOCK", 30)
    assert alignment_coverage(alignments, lengths=[12]) == whole
    assert whole["depth"] == (np.array([list(r) for r in {"A" * 12, *rows}]) != "-").sum(0).tolist()


def test_an_alignment_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expected alignment rows of the 4 residues"):
        alignment_coverage([([msa("MKT")], [])], lengths=[4])
    with pytest.raises(ValueError, match="argument 2 is longer"):
        alignment_coverage([([msa("MKT")], [])], lengths=[3, 3])
