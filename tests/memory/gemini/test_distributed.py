"""Data parallelism: gradients are averaged, and ranks that measured differently decide alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastfold.memory import Gemini
from tests.memory.gemini.gpt_runs import adam, build, gpt, tokens


def _rank(rank: int, folder: str, shard: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = build(layers=3)
    manager = Gemini(model, adam(model), budget=40_000, group=dist.group.WORLD, shard=shard)
    for step in range(3):
        batch = tokens(10 * step + rank)
        with manager.device.running():
            # One rank keeps more in addition to the model than the other, and only its own device would know.
            ballast = torch.zeros(1000 * rank)
            gpt.next_token_loss(model(batch), batch).backward()
        manager.step()
        manager.zero_grad()
        del ballast
        if rank == 0:
            model.eval()
            with torch.no_grad():
                model(batch)
            model.train()
    others = [plan.others for plan in manager.residency.plans if len(plan.others) > 50]
    states = manager.state_dict()
    own = sum("exp_avg" in states for states in manager.optimizer.state.values())
    torch.save({**states, "others": others, "own": own}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks_decide_alike_and_train_on_the_mean_gradient(shard: bool, tmp_path: Path) -> None:
    """Equal parameters on both, those of one process with the mean of both gradients, by plans on equal numbers.

    One rank evaluates between steps, alone, which must not make it wait for the other. Sharded, each has a part of the
    optimizer's states, and their plain state dicts are whole.
    """
    mp.spawn(_rank, args=(str(tmp_path), shard), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["others"] == second["others"]
    assert first["others"]
    model = build(layers=3)
    optimizer = adam(model)
    for step in range(3):
        for rank in range(2):
            batch = tokens(10 * step + rank)
            gpt.next_token_loss(model(batch), batch).backward()
        for parameter in model.parameters():
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(first["model"][name], second["model"][name])
        assert torch.equal(first["model"][name], value), name
    plain = optimizer.state_dict()["state"]
    for index, expected in plain.items():
        for name, value in expected.items():
            assert torch.equal(first["optimizer"]["state"][index][name], value)
            assert torch.equal(second["optimizer"]["state"][index][name], value)
    owned = (first["own"], second["own"])
    assert sum(owned) == len(plain) if shard else owned == (len(plain), len(plain))
    assert all(owned)
