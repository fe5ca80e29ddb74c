"""Templates of scored structures: AF2Rank's geometry, and nothing of sequence and side chains."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fastfold.data.templates.whole.given import GivenStructure, virtual_cb
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_writer import to_pdb
from tests.helpers.structures import make_protein

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


def test_cb_lies_where_af2rank_puts_it() -> None:
    n, ca, c = (np.array(PUBLISHED[key]) for key in ("n", "ca", "c"))
    np.testing.assert_allclose(virtual_cb(n, ca, c), PUBLISHED["cb"], atol=2e-6)


def test_the_template_hides_sequence_and_side_chains(tmp_path: Path) -> None:
    """Glycine gets a CB, atoms beyond O go, and letters are gaps."""
    path = tmp_path / "x.pdb"
    path.write_text(to_pdb(make_protein("GWK", "AA")))
    first, second = GivenStructure(path, "template").templates() or ()
    assert first["template_aatype"].argmax(-1).tolist() == [[21] * 3]
    mask = first["template_all_atom_masks"][0]
    assert mask[:, :5].all()
    assert not mask[:, 5:].any()
    assert not first["template_all_atom_positions"][0, :, 5:].any()
    assert first["template_all_atom_positions"][0, 0, rc.atom_order["CB"]].any()
    assert [one["template_frame"].tolist() for one in (first, second)] == [[1], [1]]


def test_a_binder_sees_its_target(tmp_path: Path) -> None:
    """The first chain is empty, the others keep letters and side chains."""
    path = tmp_path / "x.pdb"
    path.write_text(to_pdb(make_protein("GWK", "AW")))
    assert GivenStructure(path, "initial_guess").templates() is None
    binder, target = GivenStructure(path, "initial_guess", shows_targets=True).templates() or ()
    assert not binder["template_all_atom_masks"].any()
    assert binder["template_aatype"].argmax(-1).tolist() == [[21] * 3]
    assert target["template_aatype"].argmax(-1).tolist() == [[rc.hhblits_letter_to_id[x] for x in "AW"]]
    assert target["template_all_atom_masks"][0, 1, rc.atom_order["CZ2"]] == 1
