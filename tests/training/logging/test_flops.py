"""Operations of a step: those that PyTorch counts, once for each shape, forward and backward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fastfold.kernels import attention
from fastfold.training.logging import profiling
from fastfold.training.logging.loggers import read_json_lines
from fastfold.training.logging.profiling import FlopCounter, flop_rates
from tests.training.test_train import here, metrics, weights

SAMPLE = {"x": np.zeros((5, 7))}


def counted(counter: FlopCounter, work: nn.Module, rows: int, recycles: int = 0) -> tuple[float, int]:
    x = torch.ones(rows, 8)
    with counter.sample({"x": x.numpy()}, rows, recycles):
        work(x).sum().backward()
    return counter.take()


def test_they_are_those_of_pytorch_forward_and_backward():
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with FlopCounterMode(display=False) as expected:
        network(torch.ones(3, 8)).sum().backward()
    found, residues = counted(FlopCounter(enabled=True), network, 3)
    # The first layer has no gradient of its input.
    assert found == expected.get_total_flops() == 2 * 3 * (2 * 8 * 16 + 3 * 16 * 4)
    assert residues == 3


def test_fused_operators_count_what_they_declare():
    batch, length, heads, channels = 2, 3, 6, 4
    q, k, v = (torch.randn(batch, length, heads, channels) for _ in range(3))
    counter = FlopCounter(enabled=True)
    with counter.sample(SAMPLE, 5, 0), torch.no_grad():
        attention(q, k, v)
    assert counter.take()[0] == 2 * 2 * batch * heads * length**2 * channels


def test_every_shape_is_counted_once_and_no_two_in_a_row(monkeypatch: pytest.MonkeyPatch):
    counter, network, seen = FlopCounter(enabled=True), nn.Linear(8, 1), []
    count = profiling.operator_cost

    def noticed(*call):
        seen.append(call[0])
        return count(*call)

    monkeypatch.setattr(profiling, "operator_cost", noticed)
    first = counted(counter, network, 3)
    assert seen
    seen.clear()
    assert counted(counter, network, 3) == first
    assert counted(counter, network, 6) == (0.0, 0)  # of another shape, too soon to be counted
    for _ in range(profiling._BETWEEN_COUNTS):
        assert counted(counter, network, 3) == first
    assert not seen
    assert counted(counter, network, 6) == (2 * first[0], 6)
    assert counted(counter, network, 6, recycles=1) == (0.0, 0)


def test_what_cannot_be_seen_is_not_counted():
    assert counted(FlopCounter(enabled=False), nn.Linear(8, 1), 3) == (0.0, 0)
    assert flop_rates(0.0, 0.0, 1.0, 2) == {}


def test_rates_are_of_all_devices_and_of_one():
    found = flop_rates(3e12, 0.75, 2.0, 4)
    assert found == {"tflops_per_s": 2.0, "tflops_per_s_device": 0.5, "flops_counted": 0.75}


@pytest.mark.usefixtures("with_report")
@pytest.mark.slow
def test_a_run_logs_them_and_computes_the_same(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = ["trainer.steps=4", "data.max_length=12", "data.max_recycles=0"]
    assert here(data_folder, tmp_path / "run", *run)
    lines = metrics(tmp_path / "run")
    assert [line["flops_counted"] for line in lines] == [1.0] * 4
    assert all(line["tflops_per_s"] > 0 for line in lines)
    seconds = np.diff([0.0, *(line["seconds"] for line in lines)])
    work = [line["tflops_per_s"] * of_step for line, of_step in zip(lines, seconds, strict=True)]
    np.testing.assert_allclose(work, work[0], rtol=1e-6)  # the same chain in each
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert f"| TFLOP/s, all devices | {np.mean([line['tflops_per_s'] for line in lines]):.3g} |" in page
    monkeypatch.setattr(FlopCounter, "sample", lambda *_: torch.enable_grad())
    assert here(data_folder, tmp_path / "uncounted", *run)
    assert all("tflops_per_s" not in line for line in metrics(tmp_path / "uncounted"))
    plain = weights(tmp_path / "uncounted")
    assert all(torch.equal(x, plain[name]) for name, x in weights(tmp_path / "run").items())


def test_no_profile_unless_asked_for(data_folder: Path, tmp_path: Path):
    assert here(data_folder, tmp_path / "run", "trainer.steps=1")
    assert not (tmp_path / "run" / "profile").exists()
    assert not [e for e in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "event" in e]
