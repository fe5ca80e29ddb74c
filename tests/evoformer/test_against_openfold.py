"""The benchmark against OpenFold: what of it can be tried without a checkout."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def benchmark() -> ModuleType:
    return importlib.import_module("benchmarks.against_openfold")


def test_a_folder_without_openfold_is_refused(
    benchmark: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["against_openfold.py", "--openfold", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        benchmark.main()
    assert stop.value.code == 2
    assert f"found no openfold/model/evoformer.py in {tmp_path}" in capsys.readouterr().err


def test_outputs_are_compared_by_their_root_mean_square(benchmark: ModuleType, tmp_path: Path) -> None:
    msa, pair = torch.randn(3, 4, 5), torch.randn(4, 4, 5)
    torch.save((msa, pair), tmp_path / "openfold.pt")
    torch.save((msa * 1.01, pair * 0.98), tmp_path / "fastfold.pt")
    assert benchmark.difference(tmp_path) == pytest.approx(0.02, rel=1e-4)


def test_a_pass_without_enough_memory_is_shown_as_such(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {"seconds": 2.0, "peak": 3 * 2**20}
    results = {
        "forward": {"fastfold": ours, "openfold": ours | {"seconds": 5.0}, "times_faster": 2.5},
        "forward + backward": {"fastfold": ours},
    }
    benchmark.show(benchmark.CASES["one"], results, 2**20)
    *_, forward, backward = capsys.readouterr().out.splitlines()
    assert " ".join(forward.split()) == "forward 2.00 s, 3.0 U 5.00 s, 3.0 U 2.50 -"
    assert " ".join(backward.split()) == "forward + backward 2.00 s, 3.0 U out of memory - -"
