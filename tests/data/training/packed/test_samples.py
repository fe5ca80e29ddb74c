"""A record holds all that an entry's files hold."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.msa import parse_a3m
from fastfold.data.templates.hits import parse_hhr, parse_hmmsearch
from fastfold.data.training.entry import ComplexMsas, EntryData
from fastfold.data.training.packed import samples
from fastfold.data.training.packed.samples import of_record, to_record
from fastfold.errors import InputError
from tests.data.training.test_cache import assert_equal
from tests.helpers.sample_chains import chain_structure
from tests.helpers.template_files import HOMOLOGUE, QUERY, hhr, sto

CHAINS = tuple(
    replace(chain, b_factors=chain.b_factors * chain.mask)
    for chain in (chain_structure(0, 12, chain_id="A"), chain_structure(6, 10, chain_id="B"))
)
MSAS = tuple(parse_a3m(f">q\n{chain.sequence}\n>r\n{'w' + chain.sequence}\n") for chain in CHAINS)
HITS = {
    QUERY: parse_hhr(hhr([("1abc_A", QUERY, HOMOLOGUE, 9.5)]), QUERY),
    HOMOLOGUE: parse_hmmsearch(sto({"1abc_A/3-42": "ac" + HOMOLOGUE}), HOMOLOGUE),
    "M": [],
}


@pytest.mark.parametrize("alignments", [(), MSAS[:1], (MSAS[0], MSAS[0])])
def test_a_chain_comes_back(alignments: tuple) -> None:
    data = EntryData((CHAINS[0],), (ComplexMsas(alignments),), 1.5, "2001-02-03")
    found = of_record(to_record(data, HITS))
    assert_equal(found, data)
    assert found.hits == HITS
    assert of_record(to_record(replace(data, resolution=None), {})).resolution is None


def test_a_complex_comes_back(tmp_path: Path) -> None:
    """Copies of a chain share their alignments; those to pair are kept apart."""
    msas = (ComplexMsas(MSAS[:1], MSAS[:1]), ComplexMsas(), ComplexMsas(MSAS[:1], MSAS[:1]))
    chains = (CHAINS[0], CHAINS[1], replace(CHAINS[0], chain_id="C"))
    data = EntryData(chains, msas, None, "")
    found = of_record(to_record(data, {}))
    assert [chain.chain_id for chain in found.chains] == ["A", "B", "C"]
    for number in range(3):
        np.testing.assert_array_equal(found.chains[number].positions, chains[number].positions)
        for mine, theirs in zip(found.msas[number], msas[number], strict=True):
            assert [msa.sequences for msa in mine] == [msa.sequences for msa in theirs]
            assert all(np.array_equal(a.deletions, b.deletions) for a, b in zip(mine, theirs, strict=True))
    assert (found.resolution, found.release_date, found.hits) == (None, "", {})


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    record = to_record(EntryData((CHAINS[0],), (ComplexMsas(),), None), {})
    for damaged in (record[:-4], b"no record"):
        with pytest.raises(InputError, match=r"cannot be read .*; build it again"):
            of_record(damaged)
    monkeypatch.setattr(samples, "_VERSION", "another")
    with pytest.raises(InputError, match="by another version of FastFold; build it again"):
        of_record(record)


def test_a_record_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MAX_RECORD", 1 << 20)
    with pytest.raises(InputError, match="unpacks to more than 1 MiB"):
        of_record(zlib.compress(bytes(4 << 20)))
