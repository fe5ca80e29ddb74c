"""Samples of a target: what they change, that they are repeatable, and targets without any."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fastfold.data.msa.msa import Msa, parse_a3m
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.ensemble.samples import Sample, draw_samples
from fastfold.inference.ensemble.settings import Sampling
from tests.inference.runner.inputs import OTHER, SEQUENCE, a3m

TARGET = target_from_sequence(SEQUENCE, "T1")
DEEP = [([parse_a3m(a3m(SEQUENCE, rows=40))], [])]


def drawn(
    sampling: Sampling, seed: int = 0, target: Target = TARGET, alignments: Sequence = DEEP
) -> list[Sample]:
    found = draw_samples(sampling, target, alignments, seed)
    assert None not in found
    return found  # type: ignore[return-value]


def rows(sample: Sample) -> tuple[str, ...]:
    (((msa,), _),) = sample.drawn
    return msa.sequences


def test_columns_mask_all_rows_but_the_query():
    samples = drawn(Sampling("columns", fraction=0.35))
    assert [sample.label for sample in samples] == [f"columns_{k:03d}" for k in range(1, 11)]
    for sample in samples:
        query, *others = (np.array(list(row)) for row in rows(sample))
        assert "".join(query) == SEQUENCE
        masked = np.all(np.array(others) == "X", axis=0)
        assert masked.sum() == 3
        original = np.array([list(row) for row in DEEP[0][0][0].sequences[1:]])
        assert np.array_equal(np.array(others)[:, ~masked], original[:, ~masked])
    assert len({rows(sample) for sample in samples}) > 5


def test_depths_take_turns_and_rows_are_random():
    samples = drawn(Sampling("depth", number=5, depths=(4, 16, 64)))
    assert [len(rows(sample)) for sample in samples] == [5, 17, 5, 17, 5]
    assert all(rows(sample)[0] == SEQUENCE for sample in samples)
    assert rows(samples[0]) != rows(samples[2])
    every = DEEP[0][0][0].sequences
    assert all(set(rows(sample)) <= set(every) for sample in samples)
    assert len(drawn(Sampling("depth", depths=(4, 16, 64)))) == 2


def test_more_samples_do_not_change_the_first_and_seeds_do():
    few, more = drawn(Sampling("columns", number=2)), drawn(Sampling("columns", number=4))
    assert [rows(one) for one in few] == [rows(one) for one in more[:2]]
    assert [one.draw_seed for one in few] == [one.draw_seed for one in more[:2]]
    other = drawn(Sampling("columns", number=4), seed=1)
    assert len({one.draw_seed for one in (*more, *other)}) == 8
    assert [rows(one) for one in more] != [rows(one) for one in other]


def test_dropout_keeps_the_alignment():
    first, second = drawn(Sampling("dropout", number=2))
    assert first.drawn == DEEP
    assert first.files() == {}
    assert first.draw_seed != second.draw_seed


def test_the_largest_clusters_come_first():
    pytest.importorskip("sklearn")
    families = ["MKTAYIAKQR"] + ["MKTAYIAKQA"] * 12 + ["WWWWWWWWWG"] * 24
    msa = parse_a3m("".join(f">{k}\n{row}\n" for k, row in enumerate(families)))
    samples = drawn(Sampling("clusters"), alignments=[([msa], [])])
    assert [rows(sample) for sample in samples] == [
        (SEQUENCE, *families[13:]),
        (SEQUENCE, *families[1:13]),
    ]
    assert len(drawn(Sampling("clusters", number=1), alignments=[([msa], [])])) == 1


def test_copies_of_a_chain_have_the_same_masked_columns():
    target = target_from_sequence(f"{SEQUENCE}:{OTHER}:{SEQUENCE}", "T1")
    own, other = (parse_a3m(a3m(sequence)) for sequence in (SEQUENCE, OTHER))
    alignments = [([own], [own]), ([other], [other]), ([own], [own])]
    (sample,) = drawn(Sampling("columns", number=1, fraction=0.3), target=target, alignments=alignments)
    first, second, third = sample.drawn
    assert first[0][0].sequences == third[0][0].sequences == first[1][0].sequences
    assert not first[0][0].as_is
    assert second[0][0].sequences[1].count("X") == 2
    assert sorted(sample.files()) == [f"_msa_{c}{kind}.a3m" for c in "ABC" for kind in ("", "_paired")]


def test_depth_of_a_complex_keeps_paired_rows_together():
    target = target_from_sequence(f"{SEQUENCE}:{OTHER}", "T1")
    alignments = []
    for sequence in (SEQUENCE, OTHER):
        names = "".join(
            f">tr|P{k:05d}|P{k:05d}_S{k}/1-9\n{sequence[:-1]}{letter}\n" for k, letter in enumerate("CDEFW")
        )
        alignments.append(([parse_a3m(a3m(sequence, rows=30))], [parse_a3m(f">query\n{sequence}\n{names}")]))
    samples = drawn(Sampling("depth", number=20, depths=(8,)), target=target, alignments=alignments)
    seen = set()
    for sample in samples:
        (own, paired), (other, other_paired) = sample.drawn
        lines = list(zip(paired[0].sequences, other_paired[0].sequences, strict=True))
        assert lines[0] == (SEQUENCE, OTHER)
        assert all(first[-1] == second[-1] for first, second in lines[1:])
        assert sample.values["paired"] == len(lines) - 1
        rows = [row for group in (own, other) for msa in group for row in msa.sequences]
        assert len(rows) + len(lines) - 1 == 8
        seen.add((*lines, *rows))
    assert len(seen) == 20
    assert len({sample.values["paired"] for sample in samples}) > 1


def test_rows_that_are_only_for_pairing_are_no_alignment_of_one_chain():
    with pytest.raises(InputError, match="there is none"):
        draw_samples(Sampling("depth"), TARGET, [([], DEEP[0][0])], 0)


@pytest.mark.parametrize(
    ("sampling", "target", "msa", "message"),
    [
        (Sampling("columns"), SEQUENCE, None, "there is none; search for one, or use --sample dropout"),
        (Sampling("depth", depths=(64,)), SEQUENCE, 10, "9 rows besides the query, not more than .* 64"),
        (Sampling("depth"), f"{SEQUENCE}:{SEQUENCE}", 10, "9 rows besides the query"),
        (
            Sampling("clusters"),
            f"{SEQUENCE}:{SEQUENCE}",
            10,
            "takes the rows of one chain; use --sample depth",
        ),
        (Sampling("clusters"), SEQUENCE, 4, "no clusters among 3 alignment rows"),
    ],
)
def test_a_target_without_samples_is_refused(sampling: Sampling, target: str, msa: int | None, message: str):
    if sampling.method == "clusters":
        pytest.importorskip("sklearn")
    one: list[Msa] = [] if msa is None else [parse_a3m(a3m(SEQUENCE, rows=msa))]
    chains = target.count(":") + 1
    with pytest.raises(InputError, match=message):
        draw_samples(sampling, target_from_sequence(target, "T1"), [(one, [])] * chains, 0)
