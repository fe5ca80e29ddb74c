"""Passes as functions of tensors: padded inputs have the outputs of the network."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastfold.data.features.pipeline import sampler_from_merged
from fastfold.errors import InputError
from fastfold.evoformer.confidence import plddt
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import load_model
from fastfold.products.exporting import network_pass
from fastfold.products.exporting.export import ExportedNetwork
from fastfold.products.exporting.network_pass import (
    LengthClass,
    NetworkPass,
    UnrolledPasses,
    first_previous,
    pad_features,
    read_features,
)
from tests.helpers.networks import folder, oracle_arrays, oracle_config

SHAPES = {"synthetic_monomer": LengthClass(37, 12, 20, 4), "synthetic_multimer": LengthClass(53, 12, 20, 4)}
"""37 residues: as many as atoms of a residue, which padding must not confuse."""


@functools.cache
def recorded(name: str) -> tuple[AlphaFold, list[dict[str, Tensor]]]:
    config, arrays = oracle_config(name), oracle_arrays(name, "features")
    if "multimer" in name:
        sampler = sampler_from_merged(arrays, config, deterministic=True)
        passes = [sampler.sample(cycle) for cycle in range(2)]
    else:
        passes = [{key: value[cycle] for key, value in arrays.items()} for cycle in range(2)]
    features = [{key: torch.as_tensor(np.asarray(value)) for key, value in one.items()} for one in passes]
    return load_model(folder(name) / "params.npz", config=config).eval(), features


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_padded_passes_equal_the_network(name: str):
    model, features = recorded(name)
    (names, _), residues = read_features(model, SHAPES[name]), features[0]["aatype"].shape[-1]
    padded = [pad_features({key: one[key] for key in names}, SHAPES[name]) for one in features]
    assert {key: (value.shape, value.dtype) for key, value in padded[0].items()} == {
        key: (value.shape, value.dtype) for key, value in names.items()
    }
    stacked = {key: torch.stack([one[key] for one in padded]) for key in names}
    with torch.no_grad():
        found = UnrolledPasses(model, 1)(stacked)
        wanted = model(lambda cycle, member: features[cycle], 1, recycle_tolerance=0.0)
    own = slice(residues)
    single = wanted["representations"]["single"]
    assert (found["single"][own] - single).norm() / single.norm() < 1e-4
    positions = wanted["structure_module"]["final_atom_positions"]
    assert (found["prev_pos"][own] - positions).norm() / positions.norm() < 1e-4
    assert (found["plddt"][own] - plddt(wanted["predicted_lddt"]["logits"])).abs().max() < 1e-2


@pytest.mark.long
@pytest.mark.parametrize(
    ("tolerance", "passes", "recycles"), [(1000.0, 1, 2), pytest.param(0.01, 3, 3, marks=pytest.mark.slow)]
)
def test_unrolled_passes_end_where_the_network_stops(tolerance: float, passes: int, recycles: int):
    """At the pass after the first stable one, which padding does not change."""
    name = "synthetic_multimer"
    model, (first, second) = recorded(name)
    names, _ = read_features(model, SHAPES[name])
    padded = [pad_features({key: one[key] for key in names}, SHAPES[name]) for one in (first, second)] * 2
    padded = padded[: recycles + 1]
    with torch.no_grad():
        stacked = {key: torch.stack([one[key] for one in padded]) for key in names}
        found = UnrolledPasses(model, recycles, tolerance)(stacked)
        wanted = model(
            lambda cycle, member: (first, second)[cycle % 2], recycles, recycle_tolerance=tolerance
        )
    assert wanted["num_recycles"] == passes
    single = wanted["representations"]["single"]
    assert (found["single"][: len(single)] - single).norm() / single.norm() < 1e-4


def test_a_pass_continues_from_the_one_before():
    model, features = recorded("synthetic_monomer")
    names, _ = read_features(model, SHAPES["synthetic_monomer"])
    step, found = NetworkPass(model), first_previous(model, 28)
    with torch.no_grad():
        for one in features:
            previous = {key: found[key] for key in ("prev_pos", "prev_msa_first_row", "prev_pair")}
            found = step({key: one[key] for key in names}, previous)
        wanted = model(lambda cycle, member: features[cycle], 1)
    assert torch.equal(found["prev_pair"], wanted["representations"]["pair"])


def test_features_that_a_program_does_not_read_are_named():
    model = AlphaFold(oracle_config("synthetic_multimer"))
    _, names = read_features(model, SHAPES["synthetic_multimer"])
    assert {"initial_positions", "template_frame"} <= set(names)
    network = ExportedNetwork(
        Path("a.pt2"),
        SHAPES["synthetic_multimer"],
        None,
        False,
        lambda *_: {},
        ("aatype",),
        {},
        has_exact_length=False,
        unread=tuple(names),
    )
    features = {"aatype": torch.zeros(10, dtype=torch.int32)}
    assert network(features) == {}
    with pytest.raises(InputError, match="does not read the feature template_frame"):
        network(features | {"template_frame": torch.zeros(4, 10)})


def test_features_beyond_the_class_are_refused():
    model, features = recorded("synthetic_monomer")
    names, _ = read_features(model, LengthClass(20, 12, 20, 4))
    with pytest.raises(ValueError, match=r"aatype has shape \[28\], the class \[20\]"):
        pad_features({key: features[0][key] for key in names}, LengthClass(20, 12, 20, 4))


@pytest.mark.parametrize(
    ("scales", "tolerance", "last"),
    [
        ([1, 3, 3, 5, 9], 0.1, 3),  # one more pass follows the first that changes nothing
        ([1, 3, 5, 7, 9], 0.1, 4),
        ([1, 1, 5, 7, 9], 0.1, 2),
        ([0, 5, 7, 9, 9], 0.1, 1),  # the first pass changes nothing from zeros
        ([1, 3, 3, 5, 9], 0.0, 4),
        ([3, 6, 7, 9, 12], 1.6, 3),  # distances of CA atoms change by 1.58 Å
    ],
)
def test_passes_after_the_tolerance_change_nothing(
    monkeypatch: pytest.MonkeyPatch, scales: list[int], tolerance: float, last: int
) -> None:
    """CA atoms on a line of chosen steps; root mean squares of changes are those of four residues."""

    class Step(nn.Module):
        model = None

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def forward(self, features: dict[str, Tensor], previous: dict[str, Tensor]) -> dict[str, Tensor]:
            self.seen.append(float(previous["prev_pair"]))
            positions = torch.zeros(4, 37, 3)
            positions[:, 1, 0] = float(features["scale"]) * torch.arange(4.0)
            return {"prev_pos": positions, "prev_pair": features["scale"], "plddt": features["scale"] * 2}

    def zeros(model: object, residues: int) -> dict[str, Tensor]:
        assert residues == 4
        return {
            "prev_pos": torch.zeros(4, 37, 3),
            "prev_pair": torch.zeros(()),
            "prev_msa_first_row": torch.zeros(()),
        }

    monkeypatch.setattr(network_pass, "first_previous", zeros)
    monkeypatch.setattr(network_pass, "_RECYCLED", ("prev_pos", "prev_pair"))
    passes = UnrolledPasses.__new__(UnrolledPasses)
    nn.Module.__init__(passes)
    passes.step, passes.num_recycles, passes.tolerance = Step(), len(scales) - 1, tolerance  # type: ignore[assignment]
    features = {
        "scale": torch.tensor(scales, dtype=torch.float32),
        "aatype": torch.zeros(len(scales), 4),
        "seq_mask": torch.ones(len(scales), 4),
    }
    outputs = passes(features)
    assert float(outputs["plddt"]) == 2 * scales[last]
    assert float(outputs["prev_pair"]) == scales[last]
    seen = [0.0, *map(float, scales[:last])]
    assert passes.step.seen == seen + [float(scales[last])] * (len(scales) - len(seen))
