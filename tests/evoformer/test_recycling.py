"""Recycling, early stop and ensembles."""

from __future__ import annotations

import pytest
import torch

from fastfold.data.features.pipeline import sampler_from_merged
from fastfold.evoformer import model as model_module
from tests.helpers.networks import oracle_arrays, oracle_features, random_model, shallow_config


def test_features_may_come_one_cycle_at_a_time() -> None:
    model = random_model(shallow_config())
    features = oracle_features()
    asked: list[tuple[int, int]] = []

    def source(cycle: int, member: int) -> dict[str, torch.Tensor]:
        asked.append((cycle, member))
        return {key: value[cycle] for key, value in features.items()}

    with torch.no_grad():
        lazily, stacked = model(source), model(features)
    assert asked == [(0, 0), (1, 0)]
    assert torch.equal(
        lazily["structure_module"]["final_atom_positions"],
        stacked["structure_module"]["final_atom_positions"],
    )


def test_more_recycles_change_the_result_and_are_counted() -> None:
    model = random_model(shallow_config())
    features = oracle_features()
    seen: list[int] = []
    with torch.no_grad():
        once = model(features, num_recycles=0, on_cycle=lambda cycle, _: seen.append(cycle))
        twice = model(features, num_recycles=1, on_cycle=lambda cycle, _: seen.append(cycle))
    assert (once["num_recycles"], twice["num_recycles"]) == (0, 1)
    assert seen == [0, 0, 1]
    assert not torch.allclose(once["representations"]["pair"], twice["representations"]["pair"])


def test_ensemble_averages_representations() -> None:
    """Pair and single are means over the samples; the masked MSA belongs to the first sample."""
    model = random_model(shallow_config())
    features = {key: value[:2] for key, value in oracle_features().items()}
    with torch.no_grad():
        both = model(features, num_recycles=0, num_ensemble=2)["representations"]
        each = [
            model({k: v[i : i + 1] for k, v in features.items()}, num_recycles=0)["representations"]
            for i in (0, 1)
        ]
    for key in ("pair", "single", "msa_first_row"):
        torch.testing.assert_close(both[key], (each[0][key] + each[1][key]) / 2)
    torch.testing.assert_close(both["msa"], each[0]["msa"])
    assert not torch.allclose(each[0]["pair"], each[1]["pair"])


@pytest.mark.long
@pytest.mark.parametrize(("tolerance", "expected"), [(-1.0, 4), (1e6, 1), (1e-9, 4)])
def test_multimer_stops_when_the_structure_settles(tolerance: float, expected: int) -> None:
    """As in the official loop one more pass follows the one that settled, and a tolerance below zero is off."""
    config = shallow_config("synthetic_multimer")
    config.model.recycle_early_stop_tolerance = tolerance
    model = random_model(config)
    merged = oracle_arrays("synthetic_multimer", "features")
    features = sampler_from_merged(merged, config, deterministic=True).sample(0)
    source = {key: torch.from_numpy(value) for key, value in features.items()}
    with torch.no_grad():
        assert model(lambda *_: source, num_recycles=4)["num_recycles"] == expected


def test_change_between_cycles_is_the_rms_of_ca_distance_changes() -> None:
    torch.manual_seed(0)
    before, after = torch.randn(2, 9, 37, 3)
    mask = (torch.arange(9) < 7).float()
    old, new = (torch.cdist(x[:7, 1], x[:7, 1]) for x in (before, after))
    expected = ((old - new).square().mean() + 1e-8).sqrt()
    found = model_module.distance_change({"prev_pos": before}, {"prev_pos": after}, mask)
    assert found == pytest.approx(expected.item(), rel=1e-5)
