"""Masked columns and chosen rows of alignments, against recorded runs of AFsample2."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from fastfold.data.features.raw import msa_features
from fastfold.data.msa.find import read_msa
from fastfold.data.msa.msa import Msa, parse_a3m
from fastfold.data.msa.sampling import a3m_text, join_alignments, mask_columns
from fastfold.inference.sampling.samples import random_columns
from tests.helpers.networks import folder

RECORD = folder("samples")
LETTERS = np.array(list("ACDEFGHIKLMNPQRSTVWYX-"))


@pytest.mark.parametrize("seed", ["0", "1"])
def test_masked_features_are_those_of_afsample2(seed: str):
    wanted = json.loads((RECORD / "record.json").read_text())["afsample2"][seed]
    msa = join_alignments([read_msa(RECORD / "alignment.a3m")], unique=True)
    query = msa.sequences[0]
    columns = random_columns(np.random.RandomState(int(seed)), len(query), 0.15)
    assert columns.tolist() == wanted["columns"]
    rows = LETTERS[msa_features([mask_columns(msa, columns, query)], query)["msa"]]
    text = "\n".join("".join(row) for row in rows)
    assert hashlib.sha256(text.encode()).hexdigest() == wanted["msa_sha256"]


def test_rows_are_unique_before_and_kept_after_masking():
    first = parse_a3m(">q\nMKT\n>a\nMAT\n>b\nMCT\n>a2\nMAT\n")
    second = parse_a3m(">q\nMKT\n>c\nM-T\n>b2\nMCT\n")
    joined = join_alignments([first, second], unique=True)
    assert joined.descriptions == ("q", "a", "b", "c")
    assert join_alignments([first, second], unique=False).descriptions == ("q", "a", "b", "a2", "c", "b2")
    masked = mask_columns(joined, np.array([1]), "MKT")
    assert masked.sequences == ("MKT", "MXT", "MXT", "MXT")
    assert len(msa_features([masked], "MKT")["msa"]) == 4


def test_a_first_row_other_than_the_query_is_masked():
    msa = Msa(("MAT",), np.zeros((1, 3), np.int32), ("a",), as_is=True)
    assert mask_columns(msa, np.array([1]), "MKT").sequences == ("MXT",)
    assert a3m_text(msa, "MKT") == ">query\nMKT\n>a\nMAT\n"


def test_written_rows_are_read_with_their_deletions():
    msa = parse_a3m(">q\nMKT\n>a\nMaaA-\n>b x\n-gCT\n")
    again = parse_a3m(a3m_text(msa.take(np.array([0, 2])), "MKT"))
    assert again.sequences == ("MKT", "-CT")
    assert again.descriptions == ("q", "b x")
    assert np.array_equal(again.deletions, msa.deletions[[0, 2]])
