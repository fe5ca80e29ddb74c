"""Numbers of a table of all pairs are those of Python's own formatting."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastfold.protein.io.pairwise_metric import has_pairwise_metric, two_decimals


def test_numbers_have_at_most_two_decimals() -> None:
    values = np.random.default_rng(0).uniform(0, 31.75, (20, 20)).astype(np.float32)
    values[0, :3] = [0.0, 5.0, 31.75]
    for row, written in zip(values, two_decimals(values, end="\n"), strict=True):
        assert written.tolist() == [f"{round(float(x), 2):g}\n".encode() for x in row]


def test_a_file_with_the_table_is_recognised(tmp_path: Path) -> None:
    with_table, without = tmp_path / "a.cif", tmp_path / "b.cif"
    with_table.write_text("loop_\n_ma_qa_metric_local_pairwise.ordinal_id\n1\n")
    without.write_text("loop_\n_ma_qa_metric_local.ordinal_id\n1\n")
    assert has_pairwise_metric(with_table)
    assert not has_pairwise_metric(without)
