"""Fine-tuning of a multimer network: the recorded weights, the losses of the paper, and the chains' exchange."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastfold.training.trainer
from fastfold.evoformer.config import model_config
from fastfold.evoformer.losses import alphafold_loss
from fastfold.evoformer.losses.violation import violation_loss
from fastfold.evoformer.weights.checkpoint import read_weights
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.protein import Protein
from fastfold.training.compose import compose_config, network_config
from fastfold.training.run import train
from fastfold.training.validation import exchange_chains
from tests.helpers.networks import ORACLES, oracle_arrays, oracle_config

WEIGHTS = ORACLES / "synthetic_multimer" / "params.npz"
_PLACES = ["data.directory=x", "trainer.out=y", f"model.weights={WEIGHTS}"]


def _changes(tree: Mapping[str, Any], official: Mapping[str, Any], place: str) -> Iterator[str]:
    """Overrides that bring the official configuration to the recorded one."""
    for key in tree.keys() & official.keys():
        if isinstance(official[key], Mapping):
            yield from _changes(tree[key], official[key], f"{place}.{key}")
        elif tree[key] != official[key]:
            yield f"{place}.{key}={tree[key]}"


def _network() -> list[str]:
    recorded, official = oracle_config("synthetic_multimer"), model_config("model_1_multimer_v3")
    return list(_changes(recorded.to_dict(), official.to_dict(), "model.overrides"))


def _write_record(path: Path) -> None:
    record = oracle_arrays("synthetic_multimer", "features")
    chains = record["asym_id"].astype(int) - 1
    protein = Protein(
        atom_positions=record["all_atom_positions"],
        atom_mask=record["all_atom_mask"].astype(np.float32),
        aatype=record["aatype"],
        residue_index=record["residue_index"] + 1,
        chain_index=chains,
        b_factors=np.zeros(record["all_atom_mask"].shape),
    )
    path.parent.mkdir(parents=True)
    path.write_text(to_pdb(protein))


def _detached(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _detached(part) for name, part in tree.items()}
    return tree.detach()


def _figures(loss: torch.Tensor, parts: Any, batch: Any, tree: Any) -> dict[str, float]:
    """The loss, the sum of its parts by hand, and the violations with and without the paper's changes."""
    violations = parts["structure_module"]["violations"]
    settings = tree.model.heads.structure_module.violation
    return {
        "loss": float(loss),
        "weighted": sum(float(tree.model.heads[name].weight * part["loss"]) for name, part in parts.items()),
        "chains": len(batch["asym_id"].unique()),
        "violation": float(violation_loss(violations, batch, settings)),
        "plain": float(violation_loss(violations, batch)),
    }


@pytest.mark.slow
def test_recorded_weights_are_fine_tuned_on_their_complex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, float]] = []

    def recorded(result: dict[str, Any], batch: dict[str, torch.Tensor], tree: Any) -> Any:
        loss, parts = alphafold_loss(result, batch, tree)
        seen.append(_figures(loss.detach(), _detached(parts), batch, tree))
        return loss, parts

    exchanged = []

    def counted(ca: Any, batch: Any, copies: Any) -> Any:
        exchanged.append(bool(copies))
        return exchange_chains(ca, batch, copies)

    monkeypatch.setattr(fastfold.training.trainer, "alphafold_loss", recorded)
    monkeypatch.setattr(fastfold.training.trainer, "exchange_chains", counted)
    _write_record(tmp_path / "data" / "train" / "9abc.pdb")
    out = tmp_path / "run"
    options = [
        "+preset=finetune_multimer",
        *_network(),
        f"model.weights={WEIGHTS}",
        f"data.directory={tmp_path / 'data'}",
        f"trainer.out={out}",
        "data.valid_split=null",
        "data.unknown_resolution=2.0",
        "data.workers=0",
        "data.max_recycles=0",
        "optim.batch_size=1",
        "optim.lr=1e-6",
        "trainer.device=cpu",
        "trainer.steps=2",
    ]
    assert train(compose_config(options))
    assert exchanged == [True, True]
    assert all(one["chains"] > 1 for one in seen)
    assert all(one["loss"] == pytest.approx(one["weighted"], rel=1e-5) for one in seen)
    assert all(one["violation"] > one["plain"] for one in seen)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1].get("skipped", 0) == 0
    tree = network_config(compose_config(options).model)
    before = read_weights(WEIGHTS, config=tree)[1]
    after = read_weights(out / "model_1_multimer_v3.safetensors")[1]
    steps = {name: float((after[name] - x).abs().max()) for name, x in before.items()}
    assert max(steps.values()) < 1e-4
    for head in ("predicted_aligned_error", "structure_module"):
        assert max(step for name, step in steps.items() if head in name) > 0


def test_the_preset_has_the_crops_and_losses_of_the_paper() -> None:
    config = compose_config(["+preset=finetune_multimer", *_PLACES])
    structure = network_config(config.model).model.heads.structure_module
    assert (config.data.crop_size, config.data.max_chains, config.optim.lr) == (640, 20, 5e-4)
    assert structure.structural_violation_loss_weight == 0.03
    assert structure.interface_fape.atom_clamp_distance == 30.0
    assert structure.intra_chain_fape.atom_clamp_distance == 10.0
    assert structure.chain_center_of_mass.weight > 0
    second = compose_config(["+preset=finetune_multimer", "model=model_2_multimer_v3", *_PLACES])
    assert second.model.name == "model_2_multimer_v3"
    assert second.model.overrides == config.model.overrides
