"""Alignments are written so that both forms are read as the same rows."""

from __future__ import annotations

import numpy as np
from pyhmmer.easel import Alphabet, DigitalMSA, TextMSA, TextSequence

from fastfold.data.msa.formats import parse_stockholm
from fastfold.data.msa.msa import parse_a3m
from fastfold.data.search.hmmer import a3m_text, stockholm_text

ROWS = {"query": "--MK-VL-", "sp|P12345|X_HUMAN/3-9": "ASM-GVLW", "b/1-2": "---KG---"}


def _alignment() -> DigitalMSA:
    sequences = [
        TextSequence(name=name, description="of x", sequence=row)
        if "/" in name
        else TextSequence(name=name, sequence=row)
        for name, row in ROWS.items()
    ]
    return TextMSA(name="x", sequences=sequences).digitize(Alphabet.amino())


def test_a3m_has_insertions_in_lower_case_and_the_query_whole() -> None:
    assert a3m_text(_alignment()).decode() == (
        ">query\nMKVL\n>sp|P12345|X_HUMAN/3-9 of x\nasM-gVLw\n>b/1-2 of x\n-Kg--\n"
    )


def test_both_forms_are_the_same_alignment() -> None:
    sto = parse_stockholm(stockholm_text(_alignment()).decode(), path="x.sto")
    a3m = parse_a3m(a3m_text(_alignment()).decode(), path="x.a3m")
    assert sto.sequences == a3m.sequences
    assert np.array_equal(sto.deletions, a3m.deletions)
    assert [text.split()[0] for text in sto.descriptions] == [text.split()[0] for text in a3m.descriptions]
