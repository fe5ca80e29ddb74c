"""Searches of a screen: each distinct chain once, those of the costliest target first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import ConfigError, InputError
from fastfold.inference.screen.job import Job, Task
from fastfold.inference.screen.search import BATCH, ChainQuery, SearchWorker, search_jobs


def test_each_distinct_chain_is_searched_once_and_every_target_waits_for_its_chains():
    texts = ["MKT:GSH", "GSH", "AWL:MKT", "GSH:GSH"]
    targets = [target_from_sequence(text, f"t{k}") for k, text in enumerate(texts)]
    jobs, needs = search_jobs(targets, [1.0, 2.0, 3.0, 4.0])
    assert [job.payload for job in jobs] == [[("GSH", True), ("AWL", True), ("MKT", True)]]
    assert needs == [frozenset([-1])] * 4


def test_chains_are_searched_together_in_the_order_in_which_targets_are_folded():
    targets = [
        target_from_sequence("ACDEFGHIKLMNPQRSTVWY"[: k % 20 + 1] * (k // 20 + 1), f"t{k}") for k in range(40)
    ]
    costs = [float(k) for k in range(40)]
    jobs, needs = search_jobs(targets, costs)
    assert [len(job.payload) for job in jobs] == [BATCH, BATCH, 40 - 2 * BATCH]
    assert [job.cost for job in jobs] == [39.0, 23.0, 7.0]
    assert needs[39] == frozenset([-1])
    assert needs[0] == frozenset([-3])
    found = {query.sequence for job in jobs for query in job.payload}
    assert found == {target.chains[0].sequence for target in targets}


def test_only_chains_of_complexes_of_different_chains_are_paired():
    targets = [target_from_sequence(text, text[:3]) for text in ("MKT:MKT", "GSH", "AWL:CDE")]
    jobs, _ = search_jobs(targets, [3.0, 2.0, 1.0])
    assert jobs[0].payload == [("MKT", False), ("GSH", False), ("AWL", True), ("CDE", True)]


def test_letters_that_are_read_as_x_are_searched_as_they_were_given():
    jobs, _ = search_jobs([target_from_sequence("MKU")], [1.0])
    assert jobs[0].payload == [("MKU", False)]


def test_a_target_with_alignments_of_its_own_is_not_searched_for():
    target = replace(target_from_sequence("MKT"), alignments=(([], []),))
    assert search_jobs([target], [1.0]) == ([], [frozenset()])


@dataclass
class Search:
    """Fails as it is told."""

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
    result = SearchWorker(Search(error))(-1, Task(Job(-1, "search", "search", ["MKT"], 1.0), None))
    assert (result.status, result.text[: len(text)]) == (status, text)
