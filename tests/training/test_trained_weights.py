"""Weights of a finished run: the plain network's parameters, and where they come from."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from fastfold.training.compose import compose_config, network_config
from fastfold.training.step_outcome import RunProgress
from fastfold.training.trained_weights import write_weights
from tests.training.conftest import NETWORK, overrides


def test_parameters_are_written_as_they_are_with_the_runs_progress(tmp_path: Path) -> None:
    from fastfold.training.build import plain_network

    settings = overrides(NETWORK, "model.overrides")
    config = compose_config([f"trainer.out={tmp_path}", "data.directory=none", "model.name=small", *settings])
    tree = network_config(config.model)
    state = plain_network(config, tree).state_dict()
    (tmp_path / "order_rank_0.jsonl").write_text('{"step": 0, "draw": 0, "id": "1abc_A", "ranks": 1}\n' * 2)
    lines: list[str] = []
    write_weights(config, tree, state, RunProgress(step=7, samples=21), lines.append)
    assert lines == [f"weights in {tmp_path / 'small.safetensors'}"]
    with safe_open(tmp_path / "small.safetensors", framework="pt") as file:
        assert {name: file.metadata()[f"trained_{name}"] for name in ("steps", "samples", "chains")} == {
            "steps": "7",
            "samples": "21",
            "chains": "1",
        }
        assert set(file.keys()) == set(state)
        assert all(torch.equal(file.get_tensor(name), x) for name, x in state.items())
