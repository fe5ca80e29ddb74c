"""The network computes what the official program printed, output by output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fastfold.data.features.pipeline import sampler_from_merged
from fastfold.evoformer.weights.checkpoint import load_model
from fastfold.products.verify import verify
from tests.conftest import require_shared
from tests.helpers.networks import folder, oracle_config

CARRIED = ("synthetic_monomer", "synthetic_multimer")
ELSEWHERE = ("monomer_ptm", "monomer_deep_msa", pytest.param("multimer_homodimer", marks=pytest.mark.slow))


@pytest.mark.parametrize("name", [*CARRIED, *ELSEWHERE])
def test_every_output_of_the_official_run_is_reproduced(name: str) -> None:
    directory: Path = folder(name) if name in CARRIED else require_shared("oracles", name)
    found = list(verify(directory))
    recorded = {
        key if file == "outputs" else f"confidence/{key}"
        for file in ("outputs", "confidence")
        for key in np.load(directory / f"{file}.npz").files
    }
    assert {comparison.name for comparison in found} == recorded
    assert [comparison for comparison in found if not comparison.passed] == []


def test_an_official_run_without_the_mask_of_chains_is_reproduced() -> None:
    """Templates in one frame, as deepmind/alphafold c77e5d2 computes them with ``multichain_mask`` set to true.

    The run has the features, parameters and settings of the other record; rows are in order and none are masked.
    """
    directory = folder("synthetic_multimer")
    recorded = {
        key: dict(np.load(directory / f"{key}.npz")) for key in ("outputs", "unmasked_outputs", "features")
    }
    merged = recorded["features"]
    merged["template_frame"] = np.full(merged["template_aatype"].shape, -1)
    config = oracle_config("synthetic_multimer")
    cycles = config.model.num_recycle + 1
    features = sampler_from_merged(merged, config, deterministic=True).stack(cycles)
    with torch.no_grad():
        found = load_model(directory / "params.npz", config=config)(
            {key: torch.as_tensor(value) for key, value in features.items()}
        )
    single, unmasked = found["representations"]["single"].numpy(), recorded["unmasked_outputs"]
    masked = recorded["outputs"]["representations/single"]

    def apart(first: np.ndarray, second: np.ndarray) -> float:
        return float(np.linalg.norm(first - second) / np.linalg.norm(second))

    assert apart(single, unmasked["representations/single"]) < 1e-5
    assert apart(single, masked) > 5e-4
    ca = found["structure_module"]["final_atom_positions"][:, 1].numpy()
    assert np.linalg.norm(ca - unmasked["ca_positions"], axis=-1).max() < 0.02


def test_a_changed_parameter_fails(tmp_path: Path) -> None:
    """The comparison can fail: one bias moved by 1% shows."""
    for path in folder("synthetic_monomer").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with np.load(tmp_path / "params.npz") as archive:
        params = {key: archive[key] for key in archive.files}
    key = "alphafold/alphafold_iteration/evoformer/single_activations//bias"
    params[key] = params[key] + 0.01
    np.savez(tmp_path / "params.npz", **params)
    assert any(not comparison.passed for comparison in verify(tmp_path))
