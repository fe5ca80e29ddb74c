"""Sequences and atoms of mmCIF entries, as templates take them."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.data.templates.entry import TemplateEntry
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from tests.helpers.template_files import QUERY, entry, position


def read(text: str, **settings: bool) -> TemplateEntry:
    return TemplateEntry(text.split("\n"), path="1abc.cif", **settings)


def test_chains_have_the_sequence_and_the_observed_atoms() -> None:
    found = read(entry({"A": QUERY, "BB": QUERY[:15]}, dates=("2012-01-01", "2010-03-04"), missing=(3,)))
    assert found.release_date == "2010-03-04"
    assert found.sequences == {"A": QUERY, "BB": QUERY[:15]}
    chain = found.chain("A")
    assert chain.positions.shape == (40, 37, 3)
    assert chain.mask[0].sum() == 4
    assert not chain.mask[2].any()
    for atom in ("N", "CA", "O"):
        np.testing.assert_allclose(chain.positions[4, rc.atom_order[atom]], position(5, atom), atol=1e-3)
    assert found.chain("BB").mask.sum() == 4 * 14


def test_the_best_of_alternate_locations_is_taken_for_each_atom() -> None:
    """The highest occupancy, the first of equal ones."""
    lines = entry({"A": QUERY[:3]}).split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("ATOM CA"))
    words = lines[at].split()
    rows = []
    for alternate, x, occupancy in (("A", "1.000", "0.40"), ("B", "2.000", "0.60"), ("C", "3.000", "0.60")):
        words[2], words[8], words[11] = alternate, x, occupancy
        rows.append(" ".join(words))
    lines[at : at + 1] = rows
    assert read("\n".join(lines)).chain("A").positions[0, rc.atom_order["CA"], 0] == 2.0


def test_names_of_atoms_are_put_right() -> None:
    """Selenium stands for sulphur, and arginine's NH1 is the one near CD."""
    text = entry({"A": "MR"}).replace(" MET L1", " MSE L1")
    rows = {
        "ATOM O . MSE": ("SE", (9.0, 9.0, 9.0)),
        "ATOM N . ARG": ("CD", (0.0, 0.0, 0.0)),
        "ATOM C . ARG": ("NH1", (5.0, 0.0, 0.0)),
        "ATOM O . ARG": ("NH2", (3.0, 0.0, 0.0)),
    }
    lines = text.split("\n")
    for i, line in enumerate(lines):
        for start, (name, xyz) in rows.items():
            if line.startswith(start):
                words = line.split()
                words[1], words[8:11] = name, [f"{value:.3f}" for value in xyz]
                lines[i] = " ".join(words)
    chain = read("\n".join(lines)).chain("A")
    assert chain.sequence == "MR"
    assert tuple(chain.positions[0, rc.atom_order["SD"]]) == (9, 9, 9)
    assert chain.positions[1, rc.atom_order["NH1"], 0] == 3.0
    assert chain.positions[1, rc.atom_order["NH2"], 0] == 5.0


def test_of_several_residue_types_at_one_place_the_first_counts() -> None:
    """The official program counts each, and puts the atoms behind one residue too early."""
    text = entry({"A": QUERY}).replace("\n1 4 ALA\n", "\n1 4 ALA\n1 4 GLY\n")
    right, official = read(text), read(text, alternatives_count=True)
    assert right.sequences["A"] == QUERY
    assert official.sequences["A"] == QUERY[:4] + "G" + QUERY[4:]
    ca = rc.atom_order["CA"]
    np.testing.assert_array_equal(right.chain("A").positions[:, ca], official.chain("A").positions[:40, ca])
    np.testing.assert_allclose(right.chain("A").positions[9, ca], position(10, "CA"), atol=1e-3)


def test_what_is_no_protein_has_no_chain() -> None:
    text = entry({"A": QUERY}).replace("'L-peptide linking'", "'DNA linking'")
    assert read(text).sequences == {}
    assert read(entry({"A": QUERY}).replace("'L-peptide linking'", "'L-PEPTIDE LINKING'")).sequences


def survive(number: int) -> int:
    """Reads mutated entries; how many were refused."""
    rng, refused = np.random.default_rng(0), 0
    text = entry({"A": QUERY[:6], "B": "GR"})
    for _ in range(number):
        data = list(text)
        for _ in range(rng.integers(1, 5)):
            at = int(rng.integers(len(data)))
            kind = rng.integers(3)
            if kind == 0:
                data[at] = str(rng.choice(list("\0\n #'?._;9-xé²")))
            elif kind == 1:
                del data[at : at + int(rng.integers(1, 60))]
            else:
                data[at:at] = data[at : at + int(rng.integers(1, 60))]
        try:
            found = read("".join(data))
            for chain_id, sequence in found.sequences.items():
                chain = found.chain(chain_id)
                assert chain.positions.shape == (len(sequence), 37, 3)
                assert np.isfinite(chain.positions).all()
        except InputError:
            refused += 1
    return refused


def test_mutated_entries_give_chains_or_one_clear_error() -> None:
    assert 50 < survive(300) < 300


@pytest.mark.slow
def test_ten_thousand_mutated_entries_give_chains_or_one_clear_error() -> None:
    assert 1000 < survive(10_000) < 10_000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("L1 1 4 ? ", "L1 1 ? ? ", "an atom of a protein lacks a place in its sequence"),
        ("\n1 4 ALA\n", "\n1 ? ALA\n", "a residue of the sequence lacks a number"),
        ("_atom_site.group_PDB\n", "", "expected 15 values in each"),
    ],
)
def test_damaged_entries_are_refused(old: str, new: str, message: str) -> None:
    text = entry({"A": QUERY})
    assert old in text
    with pytest.raises(InputError, match=message):
        read(text.replace(old, new))


@pytest.mark.parametrize("wrong", ["nan", "1_0.0"])
def test_a_coordinate_that_is_no_number_is_refused_with_its_chain(wrong: str) -> None:
    text = entry({"A": QUERY, "B": QUERY})
    x = f"{position(1, 'N')[0]:.3f}"
    found = read(text.replace(f"L1 1 1 ? {x}", f"L1 1 1 ? {wrong}"))
    assert found.chain("B").mask.sum() == 160
    with pytest.raises(InputError, match=f"expected a number for an atom, found '{wrong}'"):
        found.chain("A")
