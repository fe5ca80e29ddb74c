"""Samples of a target: what they change, that they are repeatable, and targets without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fastfold.data.features.pipeline import featurize
from fastfold.data.msa.msa import Msa, parse_a3m
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import InputError
from fastfold.evoformer.config import model_config
from fastfold.inference.sampling.samples import Sample, _has_rows, draw_samples, left_out_depths
from fastfold.inference.sampling.settings import Sampling
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
        (Sampling("columns"), SEQUENCE, None, "there is none; search for one, or use sample='dropout'"),
        (Sampling("depth", depths=(64,)), SEQUENCE, 10, "9 rows besides the query, not more than .* 64"),
        (Sampling("depth"), f"{SEQUENCE}:{SEQUENCE}", 10, "9 rows besides the query"),
        (
            Sampling("clusters"),
            f"{SEQUENCE}:{SEQUENCE}",
            10,
            "takes the rows of one chain; use sample='depth'",
        ),
        (Sampling("clusters"), SEQUENCE, 4, "no clusters among 3 alignment rows"),
        (Sampling("columns"), SEQUENCE, 1, "there is none; search for one, or use sample='dropout'"),
        (
            Sampling("columns", fraction=0.09),
            SEQUENCE,
            10,
            "none of 10 columns at a fraction of 0.09; .* 0.1 ",
        ),
        (
            Sampling("columns", fraction=1.0),
            SEQUENCE,
            10,
            "all of 10 columns at a fraction of 1, which leaves",
        ),
    ],
)
def test_a_target_without_samples_is_refused(sampling: Sampling, target: str, msa: int | None, message: str):
    if sampling.method == "clusters":
        pytest.importorskip("sklearn")
    one: list[Msa] = [] if msa is None else [parse_a3m(a3m(SEQUENCE, rows=msa))]
    chains = target.count(":") + 1
    with pytest.raises(InputError, match=message):
        draw_samples(sampling, target_from_sequence(target, "T1"), [(one, [])] * chains, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["-----IAKQR"] * 20,
            "20 alignment rows, all left out for 25% gaps or more; .* cover more",
        ),
        (
            ["-----IAKQR"] * 20 + ["WWWWWWWWWW", "FFFFFFFFFF"],
            "22 alignment rows, 20 left out for 25%",
        ),
    ],
)
def test_rows_left_out_for_gaps_are_named(rows: list[str], message: str):
    pytest.importorskip("sklearn")
    msa = parse_a3m("".join(f">{k}\n{row}\n" for k, row in enumerate([SEQUENCE, *rows])))
    with pytest.raises(InputError, match=message):
        draw_samples(Sampling("clusters"), TARGET, [([msa], [])], 0)


@pytest.mark.parametrize("method", ["columns", "depth"])
def test_copies_of_the_query_are_no_rows_to_change(method: str):
    msa = parse_a3m(f">query\n{SEQUENCE}\n>copy\n{SEQUENCE}\n")
    with pytest.raises(InputError, match="there is none"):
        draw_samples(Sampling(method), TARGET, [([msa], [])], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "beyond"), [(None, [64, 128]), (1, []), (2, []), (3, [64, 128]), (4, [64, 128])]
)
def test_depths_beyond_the_alignment_are_known(number: int | None, beyond: list[int]):
    sampling = Sampling("depth", number=number, depths=(4, 16, 64, 128))
    assert left_out_depths(sampling, drawn(sampling)) == beyond


def _random_alignment(rng: np.random.Generator, query: str) -> Msa:
    """Invent rows near the query, far from it, with many gaps, insertions or unknown residues, or none at all."""
    rows = [query]
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWYXBZ"))
    for _ in range(rng.choice([0, 1, 2, 5, 40])):
        row = np.array(list(query))
        changed = rng.random(len(row)) < rng.choice([0.0, 0.1, 0.9])
        row[changed] = rng.choice(letters, changed.sum())
        row[rng.random(len(row)) < rng.choice([0.0, 0.2, 0.26, 0.9, 1.0])] = "-"
        rows.append("".join(letter + "x" * rng.binomial(1, 0.05) for letter in row))
    msa = parse_a3m("".join(f">r{k}_S{rng.integers(3)}\n{row}\n" for k, row in enumerate(rows)))
    return replace(msa, as_is=bool(rng.integers(2)))


def check_random_samples(rng: np.random.Generator) -> str:
    """Sample a random target by a random method, featurize the samples, and return the error or nothing."""
    method = rng.choice(["columns", "clusters", "depth", "dropout"])
    queries = [
        "".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), rng.choice([1, 2, 3, 9, 30]))) for _ in range(2)
    ]
    queries = [queries[k] for k in ([0], [0, 0], [0, 1])[rng.choice(3, p=[0.6, 0.1, 0.3])]]
    target = target_from_sequence(":".join(queries), "T1")
    own = {query: [_random_alignment(rng, query) for _ in range(rng.integers(3))] for query in queries}
    paired = {query: [_random_alignment(rng, query) for _ in range(rng.integers(2))] for query in queries}
    alignments = [(own[query], paired[query]) for query in queries]
    depths = tuple(int(depth) for depth in rng.choice([1, 2, 5, 30, 200], 2, replace=False))
    sampling = Sampling(
        str(method),  # type: ignore[arg-type]
        number=int(rng.choice([1, 3])) if rng.integers(2) else None,
        fraction=float(rng.choice([0.01, 0.2, 0.9, 1.0])),
        depths=depths,
    )
    config = model_config("model_1_multimer_v3" if rng.integers(2) else "model_1_ptm")
    try:
        samples = drawn(sampling, seed=int(rng.integers(5)), target=target, alignments=alignments)
        # Some random alignments cannot be paired, with samples or without.
        features = featurize(target.chains, samples[0].drawn, config, seed=0, join=target.is_complex)
    except InputError as error:
        return str(error)
    assert len(features.sample(0, 0)["aatype"]) == sum(map(len, queries))
    left_out_depths(sampling, samples)
    for sample in samples:
        chains = sample.drawn
        assert [len(msa.sequences[0]) for group in chains for msas in group for msa in msas] == [
            len(query) for query, group in zip(queries, chains, strict=True) for msas in group for _ in msas
        ]
        assert method == "dropout" or any(msa.sequences for group in chains for msas in group for msa in msas)
        for text in sample.files().values():
            assert len(parse_a3m(str(text)).sequences) >= 1
    return ""


def test_random_alignments_give_samples_or_errors_for_users():
    pytest.importorskip("sklearn")
    errors = [check_random_samples(np.random.default_rng([7, k])) for k in range(60)]
    assert 10 < errors.count("") < 50


def test_a_row_below_the_query_can_be_sampled() -> None:
    """Of a chain its own rows count, repeated ones once if they are; of a complex also those to pair."""

    def msa(*rows: str) -> Msa:
        return Msa(rows, np.zeros((len(rows), len(rows[0])), np.int32), rows)

    alone, two, same = msa("MKV"), msa("MKV", "MRV"), msa("MKV", "MKV")
    one = target_from_sequence("MKV", "T")
    for own, paired, unique, expected in (
        ([], [], False, False),
        ([alone], [], False, False),
        ([alone], [two], False, False),
        ([two], [], False, True),
        ([same], [], True, False),
        ([alone, two], [], True, True),
    ):
        assert _has_rows(one, [(own, paired)], unique=unique) == expected
    both = replace(one, chains=one.chains * 2)
    assert both.is_complex
    assert not _has_rows(both, [([alone], [alone]), ([], [])], unique=False)
    assert _has_rows(both, [([alone], []), ([], [two])], unique=False)
