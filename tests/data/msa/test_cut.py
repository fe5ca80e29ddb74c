"""Parts of proteins get the columns of the whole proteins' alignments."""

from __future__ import annotations

import numpy as np

from fastfold.data.msa.msa import Msa, parse_a3m
from fastfold.data.msa.sampling import chains_without_rows, cut_alignments
from fastfold.data.queries.pairs import _cut_chain
from fastfold.data.targets import Target, target_from_sequence


def test_columns_and_deletions_are_those_of_the_parts() -> None:
    whole = target_from_sequence("MKVLAAGIT:GSH", "t")
    parts = (_cut_chain(whole.chains[0], [(2, 3), (6, 7)]), whole.chains[1])
    target = Target("t", parts, "", "t", ())
    msa = parse_a3m(">q\nMKVLAAGIT\n>a\nMKxVLAyyAGIT\n>gaps\nM--LA--IT\n")
    paired = Msa(msa.sequences, msa.deletions, msa.descriptions, as_is=True)
    other = parse_a3m(">q\nGSH\n")
    (own, pairs), untouched = cut_alignments(target, [([msa], [paired]), ([other], [])])
    assert own[0].sequences == ("KVAG", "KVAG")
    assert own[0].deletions.tolist() == [[0, 0, 0, 0], [0, 1, 2, 0]]
    assert pairs[0].sequences == ("KVAG", "KVAG", "----")
    assert pairs[0].as_is
    assert untouched == ([other], [])
    assert np.array_equal(target.uncut.chains[0].numbers, np.arange(1, 10))


def test_a_chain_whose_rows_all_lie_outside_its_parts_is_named() -> None:
    whole = target_from_sequence("MKVLAAGIT:GSH", "t")
    target = Target("t", (_cut_chain(whole.chains[0], [(2, 3)]), whole.chains[1]), "", "t", ())
    outside, other = parse_a3m(">q\nMKVLAAGIT\n>a\n----AAGIT\n"), parse_a3m(">q\nGSH\n>b\nGSN\n")
    inside = parse_a3m(">q\nMKVLAAGIT\n>a\n--VLAAGIT\n")
    for msa, expected in ((outside, ["A"]), (inside, [])):
        alignments = [([msa], []), ([other], [])]
        assert chains_without_rows(target, alignments, cut_alignments(target, alignments)) == expected
