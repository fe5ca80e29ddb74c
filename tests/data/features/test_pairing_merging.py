"""Chains become complexes as in the official pipeline: ids, pairing by species, blocks, crops and padding."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest

from fastfold.data.features import merging
from fastfold.data.features.raw import alignment_ids, msa_features, sequence_features, template_features
from fastfold.data.msa.find import read_msa
from fastfold.data.msa.msa import Msa
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from tests.conftest import require_shared
from tests.helpers.feature_oracles import load, raw_templates

GAP = rc.gap_index
FILES = ("uniref90_hits.sto", "mgnify_hits.sto", "bfd_uniclust_hits.a3m")


def msa_of(rows: list[str], species: list[str] | None = None) -> Msa:
    """An alignment whose rows come from the species named (none: no UniProt name)."""
    names = [f"tr|A0A0K0|A0A0K0_{s}/1-9" if s else "query" for s in species or [""] * len(rows)]
    return Msa(tuple(rows), np.zeros((len(rows), len(rows[0])), np.int32), tuple(names))


def raw_of(rows: list[str]) -> dict[str, np.ndarray]:
    """Raw features of a chain, the first row, with this alignment."""
    return sequence_features(rows[0]) | msa_features([msa_of(rows)], rows[0])


def assert_merged(merged: dict[str, np.ndarray], official: dict[str, np.ndarray]) -> None:
    assert merged.keys() == official.keys()
    for name, value in official.items():
        if name == "deletion_mean":  # one float32 rounding apart, by the order of the additions
            np.testing.assert_allclose(merged[name], value, rtol=1e-6, atol=0)
        else:
            np.testing.assert_array_equal(merged[name], value, err_msg=name)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_homodimer_equals_the_official_features(order: tuple[int, ...]) -> None:
    """2Q2K: both chains' rows stand side by side; the order UniRef90, MGnify, BFD and only that gives all arrays."""
    official = load("multimer_homodimer")
    sequence = rc.aatype_to_sequence(official["aatype"][:70])
    raw = []
    for number, chain in enumerate("AB"):
        folder = require_shared("data", "2q2k", f"2q2k_{chain}")
        msas = [read_msa(folder / FILES[i]) for i in order]
        templates = raw_templates(official, slice(70 * number, 70 * number + 70))
        raw.append(
            sequence_features(sequence) | msa_features(msas, sequence) | template_features(templates, 70)
        )
    merged = merging.merge_chains(raw, [], [sequence] * 2)
    if order == (0, 1, 2):
        assert_merged(merged, official)
    else:
        assert not np.array_equal(merged["msa"], official["msa"])


def test_a_complex_of_two_entities_equals_the_official_features() -> None:
    """Two copies and another chain, without paired rows: the official ids, blocks, masks, crops and templates."""
    official = load("synthetic_multimer")
    to_hhblits = np.argsort(rc.hhblits_id_to_restype)
    raw, sequences = [], []
    for start, stop in ((0, 18), (18, 36), (36, 50)):
        columns = slice(start, stop)
        own = np.flatnonzero(official["bert_mask"][:, start])  # the query, and the chain's block
        sequence = rc.aatype_to_sequence(official["aatype"][columns])
        sequences.append(sequence)
        raw.append(
            sequence_features(sequence)
            | template_features(raw_templates(official, columns), stop - start)
            | {
                "msa": to_hhblits[official["msa"][own, columns]],
                "deletion_matrix_int": official["deletion_matrix"][own, columns].astype(int),
            }
        )
    raw_paired = [msa_features([], sequence) for sequence in sequences]
    assert_merged(merging.merge_chains(raw, raw_paired, sequences, min_rows=64), official)


def test_copies_stand_together_and_ids_count_from_one() -> None:
    """A, B, A: the order becomes A, A, B; residue numbers start again in each chain."""
    sequences = ["MK", "WWW", "MK"]
    assert merging.chain_order(sequences) == (0, 2, 1)
    raw = [raw_of([sequence]) for sequence in sequences]
    merged = merging.merge_chains(raw, [msa_features([], s) for s in sequences], sequences)
    assert rc.aatype_to_sequence(merged["aatype"]) == "MKMKWWW"
    assert merged["asym_id"].tolist() == [1, 1, 2, 2, 3, 3, 3]
    assert merged["entity_id"].tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert merged["sym_id"].tolist() == [1, 1, 2, 2, 1, 1, 1]
    assert merged["residue_index"].tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert merged["assembly_num_chains"] == 3
    assert merged["num_templates"] == 1  # an empty one, in the place of none


def test_a_homomer_is_dense_and_a_heteromer_has_blocks() -> None:
    rows = ["MK", "M-", "RK"]
    homomer = merging.merge_chains([raw_of(rows)] * 2, [], ["MK"] * 2, min_rows=5)
    types = rc.hhblits_id_to_restype[alignment_ids(rows)]
    np.testing.assert_array_equal(homomer["msa"][:3], np.tile(types, (1, 2)))
    assert homomer["msa"].shape == (5, 4)
    assert homomer["num_alignments"] == 3
    assert homomer["msa_mask"].sum(axis=1).tolist() == [4, 4, 4, 0, 0]
    assert homomer["bert_mask"].sum(axis=1).tolist() == [4, 4, 4, 0, 0]
    assert homomer["cluster_bias_mask"].tolist() == [1, 0, 0, 0, 0]

    other = ["WWW", "WW-"]
    sequences = ["MK", "WWW"]
    paired = [msa_features([], sequence) for sequence in sequences]
    heteromer = merging.merge_chains([raw_of(rows), raw_of(other)], paired, sequences, min_rows=0)
    text = ["".join((*rc.restypes_with_x, "-")[i] for i in row) for row in heteromer["msa"]]
    assert text == ["MKWWW", "M----", "RK---", "--WW-"]
    np.testing.assert_array_equal(
        heteromer["bert_mask"],
        [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]],
    )
    assert heteromer["msa_mask"].all()


def test_copies_with_alignments_of_different_depth_are_refused() -> None:
    with pytest.raises(InputError, match="2 and 1 different rows"):
        merging.merge_chains([raw_of(["MK", "RK"]), raw_of(["MK"])], [], ["MK"] * 2)


def test_paired_rows_leave_the_unpaired_ones() -> None:
    """A row that stands in a paired line is not repeated below; one species in both chains makes one line."""
    raw = [raw_of(["MK", "RK", "MR"]), raw_of(["WWW", "WW-", "AAA"])]
    paired = [
        msa_features([msa_of(["MK", "MR", "M-"], ["", "HUMAN", "MOUSE"])], "MK"),
        msa_features([msa_of(["WWW", "ACA", "WW-"], ["", "YEAST", "HUMAN"])], "WWW"),
    ]
    merged = merging.merge_chains(raw, paired, ["MK", "WWW"], min_rows=0)
    text = ["".join((*rc.restypes_with_x, "-")[i] for i in row) for row in merged["msa"]]
    assert text == ["MKWWW", "MRWW-", "RK---", "--AAA"]
    assert merged["bert_mask"][1].all()
    assert merged["num_alignments"] == 4


def test_deep_alignments_are_cropped_as_in_the_official_pipeline() -> None:
    """2,048 rows a chain; with pairing 1,024 lines, and fewer unpaired rows by the paired ones that are no gap."""
    letters = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)

    def family(seed: int) -> list[str]:
        rows = np.random.default_rng(seed).integers(0, 20, (3000, 12))
        return list(dict.fromkeys(letters[row].tobytes().decode() for row in rows))

    first, second, own = family(0), family(1), family(2)
    own[0] = first[0]
    homomer = merging.merge_chains([raw_of(own)], [], [own[0]])
    assert homomer["num_alignments"] == 2048
    np.testing.assert_array_equal(homomer["msa"], rc.hhblits_id_to_restype[alignment_ids(own[:2048])])

    def species(n: int) -> list[str]:
        return ["", *(f"S{i}" for i in range(1, n))]

    paired = [
        msa_features([msa_of(first, species(len(first)))], first[0]),
        msa_features([msa_of(second[:600], species(600))], second[0]),
    ]
    raw = [raw_of(own), raw_of(second[:1])]
    merged = merging.merge_chains(raw, paired, [own[0], second[0]])
    assert merged["num_alignments"] == 600 + (2048 - 600)
    paired[1] = msa_features([msa_of(second, species(len(second)))], second[0])
    merged = merging.merge_chains(raw, paired, [own[0], second[0]])
    assert merged["num_alignments"] == 1024 + (2048 - 1024)
    assert merged["bert_mask"].all(axis=1).sum() == 1024
    # A third chain without 500 of the species: where it has gaps, it keeps more rows of its own.
    raw.append(raw_of([*own[1:2], *own[2:2500]]))
    paired.append(msa_features([msa_of(own[1:2] + first[1:525], species(525))], own[1]))
    merged = merging.merge_chains(raw, paired, [own[0], second[0], own[1]])
    gaps = (merged["msa"][:1024, 24:] == GAP).all(axis=1).sum()
    assert gaps == 1024 - 525
    assert merged["num_alignments"] == 1024 + 1024 + (2048 - 525)


def reference_lines(chains: list[list[tuple[str, float]]]) -> list[tuple[int, ...]]:
    """Pairing by its description, with lists: ``chains`` has each row's species and similarity to the query."""
    by_species: list[dict[str, list[int]]] = []
    for rows in chains:
        found = defaultdict(list)
        for number in sorted(range(len(rows)), key=lambda i: -rows[i][1]):
            found[rows[number][0]].append(number)
        by_species.append(found)
    groups: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    groups[len(chains)].append((0,) * len(chains))
    for name in sorted(set().union(*by_species) - {""}):
        present = [found[name] for found in by_species if name in found]
        if len(present) < 2 or max(map(len, present)) > 600:
            continue
        for rank in range(min(map(len, present))):
            line = tuple(found[name][rank] if name in found else -1 for found in by_species)
            groups[len(present)].append(line)
    return [
        line
        for number in sorted(groups, reverse=True)
        for line in sorted(groups[number], key=lambda line: abs(int(np.prod(line))))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_lines_equal_the_description_of_pairing(seed: int) -> None:
    """Two to four chains, species with none to many rows, ties in similarity: the same lines in the same order."""
    rng = np.random.default_rng(seed)
    names = np.array(["", "HUMAN", "MOUSE", "YEAST", "ECOLI", "9STAP", "BACSU"])
    tables, plain = [], []
    for _ in range(rng.integers(2, 5)):
        rows = int(rng.integers(1, 40))
        msa = rng.integers(0, 3, (rows, 5))
        species = rng.choice(names[: rng.integers(2, 8)], rows)
        species[0] = ""
        tables.append(merging.rows_by_species(msa, species.astype(np.bytes_)))
        plain.append([(str(s), (row == msa[0]).mean()) for s, row in zip(species, msa, strict=True)])
    lines = merging.pair_rows(tables)
    assert [tuple(line) for line in lines.tolist()] == reference_lines(plain)
    for number, column in enumerate(lines.T):
        used = column[column > 0]
        assert len(set(used.tolist())) == len(used), f"chain {number} has a row in two lines"


def test_species_with_too_many_rows_are_not_paired() -> None:
    def table(rows: int) -> dict[bytes, np.ndarray]:
        species = np.array([b"", *[b"HUMAN"] * rows])
        return merging.rows_by_species(np.zeros((rows + 1, 2), int), species)

    assert len(merging.pair_rows([table(600), table(3)])) == 4
    assert len(merging.pair_rows([table(601), table(3)])) == 1


def test_a_chain_without_the_species_gets_a_gap() -> None:
    """Lines over all chains come before lines over some."""
    full = merging.rows_by_species(np.zeros((3, 1), int), np.array([b"", b"AAAAA", b"HUMAN"]))
    part = merging.rows_by_species(np.zeros((2, 1), int), np.array([b"", b"HUMAN"]))
    lines = merging.pair_rows([full, part, full])
    assert lines.tolist() == [[0, 0, 0], [2, 1, 2], [1, -1, 1]]
    taken = merging.take_rows(np.array([[5], [6]]), lines[:, 1], GAP)
    assert taken.tolist() == [[5], [6], [GAP]]
