"""Cost of a target, by which targets are ordered and progress is counted."""

from __future__ import annotations

import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.inference.config import InferConfig
from fastfold.inference.models import requested_networks, target_cost
from fastfold.inference.sampling.settings import Sampling


@pytest.mark.parametrize("residues", [20, 50])
def test_the_cost_counts_passes_of_networks_seeds_and_samples(residues: int) -> None:
    target, networks = target_from_sequence("M" * residues), requested_networks([])
    of_pass = (residues + 50) ** 2 * (residues + 500)
    assert target_cost(target, networks, InferConfig(num_recycles=0)) == of_pass
    assert target_cost(target, networks * 2, InferConfig(num_recycles=3)) == 2 * 4 * of_pass
    sampled = InferConfig(num_recycles=1, seeds=(0, 1, 2), sample=Sampling("dropout", number=5))
    assert target_cost(target, networks, sampled) == 3 * 5 * 2 * of_pass
