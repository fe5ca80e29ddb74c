"""Structures that a fold keeps of its passes, without a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastfold.inference.config import InferConfig
from fastfold.inference.folding.prediction import TargetFold


def _results(value: float) -> dict[str, Any]:
    return {"atom_positions": torch.full((2, 37, 3), value), "plddt": torch.tensor([value, 50.0])}


@pytest.mark.parametrize("keeps", [True, False])
def test_structures_of_all_passes_are_kept_of_the_last_run_alone(keeps: bool) -> None:
    """A run that begins again, as after one without enough memory, begins with its first pass."""
    seen: list[tuple[int, Any]] = []
    fold = TargetFold.__new__(TargetFold)
    fold.config, fold.recycles, fold._order = InferConfig(save_recycles=keeps), [], np.array([1, 0])
    fold.on_cycle = lambda cycle, results: seen.append((cycle, results))
    fold.passes, fold.target = SimpleNamespace(), SimpleNamespace()  # type: ignore[assignment]
    for cycle, value in ((0, 9.0), (0, 1.0), (1, 2.0), (2, 3.0)):
        fold.watch(cycle, _results(value))
    assert [cycle for cycle, _ in seen] == [0, 0, 1, 2]
    assert [float(one.atom_positions[0, 0, 0]) for one in fold.recycles] == ([1.0, 2.0, 3.0] if keeps else [])
    assert [one.plddt.tolist() for one in fold.recycles[-1:]] == ([[50.0, 3.0]] if keeps else [])
