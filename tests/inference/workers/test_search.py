"""Searches of a screen: each distinct chain once, those of the costliest target first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fastfold.data.msa.find import load_alignments
from fastfold.data.search.engine import Found, Report
from fastfold.data.search.store import SearchKey, SearchStore
from fastfold.data.targets import Chain, Target, target_from_sequence
from fastfold.errors import ConfigError, InputError
from fastfold.inference.workers.job import Job, Task
from fastfold.inference.workers.search import BATCH, ChainQuery, EngineSearch, search_jobs


def test_each_distinct_chain_is_searched_once_and_every_target_waits_for_its_chains(tmp_path: Path):
    texts = ["MKT:GSH", "GSH", "AWL:MKT", "GSH:GSH"]
    targets = [target_from_sequence(text, f"t{k}") for k, text in enumerate(texts)]
    jobs, needs = search_jobs(targets, [1.0, 2.0, 3.0, 4.0], tmp_path)
    assert [job.payload for job in jobs] == [[(letters, True, True) for letters in ("GSH", "AWL", "MKT")]]
    assert needs == [frozenset([-1])] * 4


def test_chains_are_searched_together_in_the_order_in_which_targets_are_folded(tmp_path: Path):
    targets = [
        target_from_sequence("ACDEFGHIKLMNPQRSTVWY"[: k % 20 + 1] * (k // 20 + 1), f"t{k}") for k in range(40)
    ]
    costs = [float(k) for k in range(40)]
    jobs, needs = search_jobs(targets, costs, tmp_path)
    assert [len(job.payload) for job in jobs] == [BATCH, BATCH, 40 - 2 * BATCH]
    assert [job.cost for job in jobs] == [39.0, 23.0, 7.0]
    assert needs[39] == frozenset([-1])
    assert needs[0] == frozenset([-3])
    found = {query.sequence for job in jobs for query in job.payload}
    assert found == {target.chains[0].sequence for target in targets}


def test_only_chains_of_complexes_of_different_chains_are_paired(tmp_path: Path):
    targets = [target_from_sequence(text, text[:3]) for text in ("MKT:MKT", "GSH", "AWL:CDE")]
    jobs, _ = search_jobs(targets, [3.0, 2.0, 1.0], tmp_path)
    assert jobs[0].payload == [
        ("MKT", True, False),
        ("GSH", True, False),
        ("AWL", True, True),
        ("CDE", True, True),
    ]


def test_different_parts_of_one_protein_are_paired(tmp_path: Path):
    """The rows of a species are in line in both parts; two copies of a part have one alignment."""
    whole = "MKTAYIAKQR"
    parts = [
        Chain(name, whole[first - 1 : last], whole=whole, regions=((first, last),))
        for name, first, last in (("A", 1, 5), ("B", 6, 10), ("C", 1, 5))
    ]
    for chains, is_paired in ((parts, True), (parts[::2], False)):
        target = Target("t", tuple(chains), "", "t", ())
        jobs, _ = search_jobs([target], [1.0], tmp_path)
        assert jobs[0].payload == [(whole, True, is_paired)]


def test_letters_that_are_read_as_x_are_searched_as_they_were_given(tmp_path: Path):
    jobs, _ = search_jobs([target_from_sequence("MKU")], [1.0], tmp_path)
    assert jobs[0].payload == [("MKU", True, False)]


def test_a_target_with_alignments_of_its_own_is_not_searched_for(tmp_path: Path):
    target = replace(target_from_sequence("MKT"), alignments=(([], []),))
    assert search_jobs([target], [1.0], tmp_path) == ([], [frozenset()])


@dataclass
class Engine:
    """Finds what the sequence says, and remembers what it was asked for."""

    name: str
    asked: list[list[str]] = field(default_factory=list)

    def key(self, store: SearchStore) -> SearchKey:
        return SearchKey(self.name, {"version": 1})

    def cost(self, sequences: Sequence[str]) -> float:
        return float(len(sequences))

    def search(self, sequences: Sequence[str], report: Report) -> Iterator[Found]:
        self.asked.append(list(sequences))
        for sequence in sequences:
            text = f"# STOCKHOLM 1.0\nquery {sequence}\n//\n"
            yield Found(sequence, {f"{self.name}_hits.sto": text.encode()}, {})


def test_a_chain_is_searched_once_in_each_place_and_found_by_every_target_that_has_it(tmp_path: Path):
    texts = {"A": "MKT", "A_and_B": "MKT:GSH", "B_and_B": "GSH:GSH"}
    targets = [target_from_sequence(text, name) for name, text in texts.items()]
    plain, pairing = Engine("uniref90"), Engine("uniprot")
    search = EngineSearch((plain, pairing), tmp_path / "msas")
    jobs, _ = search_jobs(targets, [1.0, 3.0, 2.0], tmp_path / "msas")
    for _ in range(2):  # the second time everything is there
        for job in jobs:
            assert search(job.id, Task(job, None)).status == "done"
    assert (plain.asked, pairing.asked) == ([["MKT", "GSH"]], [["MKT", "GSH"]])
    for target in targets:
        search.publish(target)
        found = load_alignments(tmp_path / "msas", target)
        assert [pair[0][0].sequences[0] for pair in found] == [chain.sequence for chain in target.chains]
        assert [bool(pair[1]) for pair in found] == [target.name == "A_and_B"] * len(target.chains)
    assert len(plain.asked) == len(pairing.asked) == 1


def test_uniprot_is_not_searched_for_chains_that_nothing_is_paired_with(tmp_path: Path):
    plain, pairing = Engine("uniref90"), Engine("uniprot")
    jobs, _ = search_jobs([target_from_sequence("MKT:MKT")], [1.0], tmp_path)
    EngineSearch((plain, pairing), tmp_path).search(jobs[0].payload)
    assert (plain.asked, pairing.asked) == ([["MKT"]], [])


@dataclass(frozen=True)
class Search(EngineSearch):
    """Fails as it is told."""

    engines: tuple[Engine, ...] = ()  # type: ignore[assignment]
    out: Path = Path()
    error: Exception | None = None

    def search(self, queries: Sequence[ChainQuery]) -> None:
        if self.error is not None:
            raise self.error

    def publish(self, target: Target) -> None:
        raise AssertionError("a search worker publishes nothing")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (None, "done", ""),
        (InputError("is damaged"), "failed", "is damaged"),
        (ConfigError("too little memory"), "fatal", "too little memory"),
        (ValueError("oops"), "failed", "internal error, ValueError: oops"),
    ],
)
def test_what_goes_wrong_in_a_search_is_the_jobs(error: Exception | None, status: str, text: str):
    result = Search(error=error)(-1, Task(Job(-1, "search", "search", ["MKT"], 1.0), None))
    assert (result.status, result.text[: len(text)]) == (status, text)
