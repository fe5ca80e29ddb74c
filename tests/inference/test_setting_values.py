"""Values at the ends of their ranges are taken, and those beyond refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig
from fastfold.inference.output import prediction as prediction_module
from fastfold.inference.output.score_files import check_scores
from fastfold.inference.planning import cuda_graph
from fastfold.inference.planning.cuda_graph import uses_cuda_graphs
from fastfold.inference.relax.protocol import _named
from fastfold.inference.report.interfaces import parse_condition
from fastfold.inference.setting_values import (
    check_batch,
    check_max_msa,
    check_seeds,
    parse_device,
    parse_max_msa,
    parse_parallel,
    parse_seeds,
)
from tests.helpers.results import helix_prediction


@pytest.mark.parametrize(
    ("parse", "value", "expected"),
    [
        (check_batch, "auto", "auto"),
        (check_batch, 1, 1),
        (check_batch, "256", 256),
        (parse_seeds, "0-99999", tuple(range(100_000))),
        (parse_seeds, "3, 1,1-2", (3, 1, 2)),
        (parse_seeds, "2147483647", (2**31 - 1,)),
        (parse_seeds, "5-5", (5,)),
        (check_seeds, [2**31 - 1, 0, 0], (2**31 - 1, 0)),
        (check_seeds, 7, (7,)),
        (check_max_msa, [1, 100_000], (1, 100_000)),
        (check_max_msa, "512:1024", (512, 1024)),
        (parse_max_msa, " 1:1 ", (1, 1)),
        (parse_device, "cuda:123", "cuda:123"),
        (parse_device, "mps", "mps"),
        (parse_parallel, None, 1),
        (parse_parallel, "dap=12", 12),
    ],
)
def test_values_within_their_range_are_taken(parse: Callable[[Any], Any], value: Any, expected: Any) -> None:
    assert parse(value) == expected


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        *((check_batch, value) for value in (0, 257, -1, True, "few", 1.5, None)),
        *(
            (parse_seeds, value)
            for value in ("0-100000", "2147483648", "3-2", "", "1,,2", "a", "1-2-3", "12345678901")
        ),
        *((check_seeds, value) for value in (-1, 2**31, [], "3", 1.5, [1, True], None)),
        *((check_max_msa, value) for value in ([0, 1], [1, 100_001], [1], [1, 2, 3], 5, [1, 1.5])),
        *((parse_max_msa, value) for value in ("1", "1:2:3", "0:1", "a:b", "1:1234567890")),
        *((parse_device, value) for value in ("gpu", "cuda:", "cuda:1234", "CPU", "cpu ")),
        *((parse_parallel, value) for value in ("tp=2", "dap", "dap=", "dap=-1", "dap=²")),
    ],
)
def test_values_beyond_their_range_are_refused(parse: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ConfigError):
        parse(value)


@pytest.mark.parametrize(("length", "is_read"), [(1000, True), (1001, False)])
def test_conditions_have_a_length(monkeypatch: pytest.MonkeyPatch, length: int, is_read: bool) -> None:
    monkeypatch.setattr("fastfold.inference.report.interfaces._MAX_LENGTH", 1000)
    text = "iptm > 0".ljust(length)
    if is_read:
        assert parse_condition(text, ["iptm"])({"iptm": 0.5})
        return
    with pytest.raises(ConfigError):
        parse_condition(text, ["iptm"])


def test_names_of_predictions_have_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastfold.inference.output.score_files._LONGEST_NAME", 5)
    scores = helix_prediction("t", 12).scores()
    assert check_scores({**scores, "name": "n" * 5})["name"] == "n" * 5
    with pytest.raises(ValueError, match="name is longer than 5 letters"):
        check_scores({**scores, "name": "n" * 6})


@pytest.mark.parametrize(("residues", "cif_pae", "has_pae"), [
    (12, None, True), (11, None, False), (12, False, False), (11, True, True),
])  # fmt: skip
def test_aligned_errors_of_short_predictions_are_in_structure_files(
    monkeypatch: pytest.MonkeyPatch, residues: int, cif_pae: bool | None, has_pae: bool
) -> None:
    monkeypatch.setattr(prediction_module, "MAX_CIF_PAE_RESIDUES", residues)
    found = helix_prediction("t", 12, cif_pae=cif_pae).modelcif_arguments()
    assert (found["pae"] is not None) is has_pae


@pytest.mark.parametrize(
    ("residues", "passes", "is_graphed"), [(100, 5, True), (101, 5, False), (100, 4, False), (1, 9, True)]
)
def test_graphs_are_for_short_targets_and_many_passes(
    monkeypatch: pytest.MonkeyPatch, residues: int, passes: int, is_graphed: bool
) -> None:
    monkeypatch.setattr(cuda_graph, "MAX_GRAPH_RESIDUES", 100)
    monkeypatch.setattr(cuda_graph, "MIN_GRAPH_PASSES", 5)
    monkeypatch.setattr(torch.version, "hip", None)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert uses_cuda_graphs(InferConfig(), cuda, residues, passes) is is_graphed
    assert not uses_cuda_graphs(InferConfig(), cpu, residues, passes)
    assert uses_cuda_graphs(InferConfig(cuda_graphs=True), cpu, residues, passes)
    assert not uses_cuda_graphs(InferConfig(cuda_graphs=False), cuda, residues, passes)
    monkeypatch.setattr(torch.version, "hip", "6")
    assert not uses_cuda_graphs(InferConfig(), cuda, residues, passes)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_the_first_violations_are_named(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr("fastfold.inference.relax.protocol._MOST_NAMED", 3)
    violations: Any = [SimpleNamespace(residue=f"A{i}", kinds=("clash", "bond")) for i in range(number)]
    shown = ", ".join(f"A{i} (clash, bond)" for i in range(min(number, 3)))
    assert _named(violations) == f" at {shown}" + (" and 1 more" if number == 4 else "")
