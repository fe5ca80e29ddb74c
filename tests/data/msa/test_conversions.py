"""Alignments are read as AlphaFold's parsers read them, in whatever form HMMER's and AlphaFold's tools write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.data.msa.formats import parse_stockholm
from fastfold.data.msa.msa import Msa, parse_a3m
from tests.conftest import require_shared

STOCKHOLM = (
    *("102m_A_c07001.sto", "1bx7_A_c04496.sto", "1ten_A_c07069.sto", "uniref90_hits.sto", "mgnify_hits.sto"),
    *("uniprot_hits.sto", "three_blocks.sto", "one_block.sto", "empty_columns.sto"),
)
A3M = ("bfd_uniclust_hits.a3m", "insertions.a3m", "wrapped.a3m")
DOTS = "dots_and_rf.sto"
"""AlphaFold takes '.' for no gap there, and fails on it later."""


def record(name: str) -> dict[str, Any]:
    """What the tools made of an alignment."""
    path = require_shared("oracles_data", "alignment_tools", "stockholm_a3m", f"{name}.json.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def source(name: str) -> str:
    """The alignment itself."""
    tools = require_shared("oracles_data", "alignment_tools")
    places = (
        tools / "stockholm_a3m" / "invented" / name,
        tools / "jackhmmer" / f"{name}.gz",
        Path(require_shared("data", "2q2k")) / "2q2k_A" / name,
    )
    path = next(path for path in places if path.exists())
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def assert_read_as(msa: Msa, official: dict[str, Any]) -> None:
    """Equal rows, deletions and names."""
    assert list(msa.sequences) == official["sequences"]
    np.testing.assert_array_equal(msa.deletions, official["deletion_matrix"])
    assert [text.split()[:1] for text in msa.descriptions] == [
        t.split()[:1] for t in official["descriptions"]
    ]


def by_name(msa: Msa) -> dict[str, tuple[str, bytes]]:
    """Rows and deletions by the name's first word, which is unique in Stockholm."""
    rows = {
        text.split()[0]: (row.replace("O", "X"), deletions.tobytes())
        for text, row, deletions in zip(msa.descriptions, msa.sequences, msa.deletions, strict=True)
    }
    assert len(rows) == len(msa.sequences)
    return rows


@pytest.mark.parametrize("name", STOCKHOLM)
def test_stockholm_is_read_as_by_alphafold(name: str) -> None:
    """And so are its conversions to A3M, and its first rows."""
    official = record(name)["alphafold"]
    msa = parse_stockholm(source(name))
    assert_read_as(msa, official["parse_stockholm"])
    assert_read_as(parse_a3m(official["convert_stockholm_to_a3m"]), official["parse_stockholm"])
    first = parse_a3m(official["convert_stockholm_to_a3m max_sequences=5"])
    truncated = parse_stockholm(official["truncate_stockholm_msa 5"])
    assert first.sequences == truncated.sequences == msa.sequences[:5]
    np.testing.assert_array_equal(truncated.deletions, msa.deletions[:5])


@pytest.mark.parametrize("name", A3M)
def test_a3m_is_read_as_by_alphafold(name: str) -> None:
    assert_read_as(parse_a3m(source(name)), record(name)["alphafold"]["parse_a3m"])


@pytest.mark.parametrize("name", STOCKHOLM)
def test_easels_stockholm_is_the_same_alignment(name: str) -> None:
    """Each row on one line; the order is another where descriptions are given, so that the query is found by name."""
    msa = parse_stockholm(source(name))
    text = record(name)["esl_reformat"]["pfam"]
    query = msa.descriptions[0].split()[0]
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith(f"{query} "))
    at = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    lines.remove(row)
    lines.insert(at, row)
    assert by_name(parse_stockholm("\n".join(lines))) == by_name(msa)


def test_dots_are_gaps_in_stockholm() -> None:
    """AlphaFold keeps them as letters, for which there is no residue; apart from the dots, rows are the same."""
    msa = parse_stockholm(source(DOTS))
    official = record(DOTS)["alphafold"]["parse_stockholm"]
    query = official["sequences"][0]
    assert "." in query
    columns = [i for i, letter in enumerate(query) if letter != "."]
    for ours, theirs in zip(msa.sequences, official["sequences"], strict=True):
        assert ours == "".join(theirs[i] for i in columns).replace(".", "-").upper()
    assert msa.deletions.sum() > np.sum(official["deletion_matrix"])
