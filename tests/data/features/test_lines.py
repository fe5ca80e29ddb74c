"""Lines of a complex's alignment: all of them make the features of the whole alignment."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.data.features.assembly import complex_lines, joined_features, multimer_features
from fastfold.data.msa.msa import ChainMsas, Msa, parse_a3m
from fastfold.data.targets import target_from_sequence

FIRST, SECOND = "MKTAYIAKQR", "GSHMAWLPE"


def species(query: str, names: str, letter: str) -> Msa:
    """A UniProt search with a row per species, the same row twice among them, and an insertion."""
    rows = [
        f">tr|A{k:05d}|A{k:05d}_{name}/1-9 x\n{query[:k]}{letter}{query[k + 1 :]}"
        for k, name in enumerate(names, 1)
    ]
    return parse_a3m(
        f">query\n{query}\n"
        + "\n".join([*rows, rows[0]]).replace(f"{query[0]}{letter}", f"{query[0]}ww{letter}")
    )


def own(query: str, number: int) -> Msa:
    letters = "ACDEFGHIKLMNPQRSTVWY"
    rows = [query[: k % len(query)] + letters[k] + query[k % len(query) + 1 :] for k in range(number)]
    return parse_a3m("".join(f">{k}\n{row}\n" for k, row in enumerate([query, *rows, rows[0]])))


def as_is(*rows: str) -> Msa:
    deletions = np.arange(len(rows), dtype=np.int32)[:, None].repeat(len(rows[0]), 1)
    return Msa(rows, deletions, ("q",) * len(rows), as_is=True)


HETERO: list[ChainMsas] = [
    ([own(FIRST, 6)], [species(FIRST, "KLMN", "W")]),
    ([own(SECOND, 5)], [species(SECOND, "MNPQ", "W")]),
]
# A row of the pairing search is also among the chain's own rows, which features drop.
HETERO[0][0].append(species(FIRST, "KLMN", "W"))
PAIRED: list[ChainMsas] = [
    ([as_is("MKTAYIAKQA")], [as_is(FIRST, "MKTAYIAKQW", "-" * 10, "MKTAYIAKQW")]),
    ([], [as_is(SECOND, "GSHMAWLPW", "GSHMAWLPY", "GSHMAWLPW")]),
]


@pytest.mark.parametrize(
    ("sequences", "alignments"),
    [
        (f"{FIRST}:{SECOND}", HETERO),
        (f"{FIRST}:{SECOND}:{FIRST}", [*HETERO, HETERO[0]]),
        (f"{FIRST}:{SECOND}", PAIRED),
        (f"{FIRST}:{FIRST}", [HETERO[0], HETERO[0]]),
    ],
    ids=["species", "copies", "lines", "homomer"],
)
def test_all_lines_make_the_features_of_the_alignment(sequences: str, alignments: list[ChainMsas]):
    chains = target_from_sequence(sequences, "T1").chains
    lines = complex_lines(chains, alignments)
    taken = lines.take(np.arange(lines.number))
    for features in (multimer_features, joined_features):
        if features is joined_features and len(set(sequences.split(":"))) == 1:
            continue  # copies of one chain are paired there, which their lines are not
        whole, found = (features(chains, one) for one in (alignments, taken))
        for name in ("msa", "deletion_matrix" if features is multimer_features else "deletion_matrix_int"):
            assert np.array_equal(found[name], whole[name]), name


def test_lines_are_counted_without_queries_and_copies():
    lines = complex_lines(target_from_sequence(f"{FIRST}:{SECOND}", "T1").chains, HETERO)
    assert lines.number_paired == 2  # the species M and N
    assert {key: len(msa.sequences) for key, msa in lines.own.items()} == {FIRST: 8, SECOND: 5}
