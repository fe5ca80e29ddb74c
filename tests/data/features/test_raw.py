"""Raw features of one chain equal those of the official data pipeline, and bad alignments are refused."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.data.features.raw import (
    alignment_ids,
    check_ids,
    check_layout,
    msa_features,
    sequence_features,
    species_identifier,
    template_features,
)
from fastfold.data.msa.find import read_msa
from fastfold.data.msa.msa import Msa
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from tests.conftest import require_shared
from tests.helpers.feature_oracles import load

FILES = ("uniref90_hits.sto", "mgnify_hits.sto", "bfd_uniclust_hits.a3m")


def make_msa(*rows: str, deletions: np.ndarray | None = None, descriptions: tuple[str, ...] = ()) -> Msa:
    """An alignment of these rows."""
    if deletions is None:
        deletions = np.zeros((len(rows), len(rows[0])), np.int32)
    return Msa(rows, deletions, descriptions or tuple(f"row{i}" for i in range(len(rows))))


def test_features_of_real_alignments_equal_the_official_ones() -> None:
    """2Q2K chain A: UniRef90, MGnify and BFD in this order give the official arrays, types included."""
    folder = require_shared("data", "2q2k", "2q2k_A")
    official = load("monomer_ptm", "raw_features.npz")
    sequence = official["sequence"].tobytes().decode()
    features = sequence_features(sequence) | msa_features([read_msa(folder / f) for f in FILES], sequence)
    for name in official.keys() - template_features({}, len(sequence)).keys():
        np.testing.assert_array_equal(features[name], official[name], err_msg=name)
        assert features[name].dtype == official[name].dtype, name


def test_letters_map_to_hhblits_ids_and_on_to_residue_types() -> None:
    """Each standard letter, X, the gap and the ambiguous letters arrive at their residue types."""
    ids = alignment_ids(["ARNDCQEGHILKMFPSTWYVX-", "BJOUZ" + "-" * 17])
    types = rc.hhblits_id_to_restype[ids]
    np.testing.assert_array_equal(types[0], np.arange(22))
    assert [rc.restypes_with_x[i] for i in types[1, :5]] == ["D", "X", "X", "C", "E"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["ACD", "AC"], "row 1 has 2 columns"),
        (["ACD", "A*D"], r"row 1, column 2: .* found '\*'"),
        (["ACD", "ACd"], "row 1, column 3: .* found 'd'"),
        (["ACD", "AéD"], "row 1, column 2: .* found 'é'"),
    ],
)
def test_rows_that_are_no_alignment_are_refused(rows: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        alignment_ids(rows)


def test_repeated_rows_are_dropped_within_and_across_alignments() -> None:
    """The first occurrence stays, with its own deletions and species."""
    first = make_msa(
        "ACDE",
        "AC-E",
        "AC-E",
        deletions=np.arange(12, dtype=np.int32).reshape(3, 4),
        descriptions=("query", "tr|A0A146SKV9|A0A146SKV9_FUNHE/1-3 x", "sp|P0C2L1|A3X1_LOXLA/1-3"),
    )
    second = make_msa("ACDE", "AC-E", "A--E", descriptions=("q", "r", "sp|P0C2L1|A3X1_LOXLA/1-3"))
    features = msa_features([first, second], "ACDE")
    np.testing.assert_array_equal(features["msa"], alignment_ids(["ACDE", "AC-E", "A--E"]))
    np.testing.assert_array_equal(features["deletion_matrix_int"], [[0, 1, 2, 3], [4, 5, 6, 7], [0] * 4])
    np.testing.assert_array_equal(features["num_alignments"], [3] * 4)
    assert features["msa_species_identifiers"].tolist() == [b"", b"FUNHE", b"LOXLA"]


def test_without_alignments_the_query_stands_alone() -> None:
    features = msa_features([], "ACX")
    np.testing.assert_array_equal(features["msa"], alignment_ids(["ACX"]))
    np.testing.assert_array_equal(features["deletion_matrix_int"], np.zeros((1, 3)))


@pytest.mark.parametrize(
    ("description", "species"),
    [
        ("tr|A0A146SKV9|A0A146SKV9_FUNHE", "FUNHE"),
        ("sp|P0C2L1|A3X1_LOXLA/12-90 [subseq from] Spider toxin OS=Loxosceles", "LOXLA"),
        ("tr|A0A146SKV9_1|A0A146SKV9_FUNHE_23/1-4", "FUNHE"),
        ("tr|A0A146SKV9|A0A146SKV9_TOOLONG", ""),
        ("UniRef90_A0A141BHY3/1-51 DNA-binding protein", ""),
        ("xx|P0C2L1|A3X1_LOXLA", ""),
        # Protenix' examples/7wux/msa/1/pairing.a3m, whose own pattern finds the taxon.
        ("UniRef100_UPI000B1A43EC_1463901/\t204\t0.926", "1463901"),
        ("UniRef100_A0A141BHY3", ""),
        ("query", ""),
        ("", ""),
    ],
)
def test_species_comes_from_uniprot_names_and_protenix_alone(description: str, species: str) -> None:
    assert species_identifier(description) == species


def test_alignments_of_another_chain_are_refused() -> None:
    with pytest.raises(InputError, match="another sequence"):
        msa_features([make_msa("ACDE")], "ACDF")
    with pytest.raises(InputError, match="another sequence"):
        msa_features([make_msa("ACDE")], "ACD")
    with pytest.raises(InputError, match="without rows"):
        msa_features([Msa((), np.zeros((0, 4), np.int32), ())], "ACDE")


def test_an_alignment_may_spell_letters_that_the_chain_has_as_unknown() -> None:
    """A FASTA reader turns U into X, the alignment's own first row still has U."""
    features = msa_features([make_msa("AUDE")], "AXDE")
    assert features["msa"].shape == (1, 4)


def test_templates_of_another_chain_are_refused() -> None:
    shapes = {"aatype": (2, 5, 22), "all_atom_positions": (2, 5, 37, 3), "all_atom_masks": (2, 5, 37)}
    templates = {f"template_{name}": np.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(InputError, match="template_sum_probs"):
        template_features(templates, 5)
    templates["template_sum_probs"] = np.zeros((2, 1))
    assert template_features(templates, 5)["template_aatype"].shape == (2, 5, 22)
    with pytest.raises(InputError, match=r"template_aatype.*\[2, 5, 22\].*N = 6"):
        template_features(templates, 6)


def test_layout_check_names_the_feature() -> None:
    """A missing, misshapen, inconsistent or empty feature, and ids out of range."""
    layout = {"msa": ("S", "N"), "aatype": ("N", 21)}
    good = {"msa": np.zeros((3, 4), int), "aatype": np.zeros((4, 21))}
    assert check_layout(good, layout) == {"S": 3, "N": 4}
    for bad, message in [
        ({"msa": good["msa"]}, "feature 'aatype' is missing"),
        (good | {"aatype": np.zeros((4, 20))}, r"'aatype' has shape \[4, 20\], expected \[N = 4, 21\]"),
        (good | {"aatype": np.zeros((5, 21))}, r"'aatype' has shape \[5, 21\], expected \[N = 4, 21\]"),
        (good | {"msa": np.zeros(4)}, r"'msa' has shape \[4\]"),
        (good | {"msa": np.zeros((0, 4))}, "'msa' is empty"),
    ]:
        with pytest.raises(InputError, match=message):
            check_layout(bad, layout)
    with pytest.raises(InputError, match="'msa' has values from -1 to 0"):
        check_ids({"msa": np.array([[0, -1]])}, "msa", 22)
