"""From chains and alignments to all rows: letters that are no residues, copies, and rows that stay as they are."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.data.features.assembly import chain_alignments, monomer_features, multimer_features
from fastfold.data.msa.msa import Msa
from fastfold.data.targets import make_chains
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc


def msa_of(*rows: str, as_is: bool = False) -> Msa:
    return Msa(tuple(rows), np.zeros((len(rows), len(rows[0])), np.int32), ("q",) * len(rows), as_is=as_is)


def test_letters_without_a_residue_are_shown_as_an_alignment_shows_them() -> None:
    """X as a type, but B as D, Z as E and U as C in the alignment, with one or without."""
    (chain,) = make_chains(["MBZUOJX"])
    assert (chain.sequence, chain.letters) == ("MXXXXXX", "MBZUOJX")
    for msas in ([], [msa_of("MBZUOJX")]):
        raw = monomer_features(chain, msas)
        assert np.argmax(raw["aatype"], axis=-1).tolist() == [12, 20, 20, 20, 20, 20, 20]
        types = rc.hhblits_id_to_restype[raw["msa"][0]]
        assert "".join((*rc.restypes_with_x, "-")[i] for i in types) == "MDECXXX"


def test_rows_as_they_stand_are_not_thinned_out() -> None:
    """Repetitions stay, and the query need not come first; AlphaFold's own alignments are joined without repeats."""
    (chain,) = make_chains(["MK"])
    assert len(monomer_features(chain, [msa_of("MK", "MR"), msa_of("MK", "MR")])["msa"]) == 2
    assert len(monomer_features(chain, [msa_of("MR", "MR", as_is=True)] * 2)["msa"]) == 4
    with pytest.raises(InputError, match="another sequence"):
        monomer_features(chain, [msa_of("MR", "MR")])


def test_copies_share_the_alignments_of_the_first() -> None:
    """Whatever the others have."""
    chains = make_chains(["MK", "WV", "MK"])
    msas = [([msa_of("MK", "MR")], []), ([], []), ([], [])]
    merged = multimer_features(chains, msas)
    assert merged["num_alignments"] == 2
    assert [len(ids) for ids in chain_alignments(chains, msas)] == [2, 2, 1]


def test_without_any_alignment_each_query_is_a_row_too() -> None:
    """As in ColabFold's mode of single sequences; AlphaFold has none."""
    merged = multimer_features(make_chains(["MK", "WV"]), [([], [])] * 2)
    assert merged["num_alignments"] == 3
    assert merged["bert_mask"][:4].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
