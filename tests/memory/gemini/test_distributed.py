"""Data parallelism: gradients are averaged, and ranks that measured differently decide alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from fastfold.memory import Gemini, GeminiConfig, SimulatedDevice, Tier
from fastfold.memory.gemini.access_trace import AccessTrace
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import build_chunks
from fastfold.memory.gemini.distributed import Ranks
from fastfold.parallel.comm.groups import Group
from tests.helpers.thread_ranks import on_one_line
from tests.memory.gemini.gpt_runs import adam, build, gpt, tokens


def _rank(rank: int, folder: str, shard: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = build(layers=3)
    manager = Gemini(model, adam(model), GeminiConfig(budget=40_000, group=dist.group.WORLD, shard=shard))
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


def _store() -> tuple[nn.Sequential, ChunkStore]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return model, ChunkStore(build_chunks(model, largest=1), SimulatedDevice(1 << 20), Tier())


@pytest.mark.parametrize("shard", [False, True])
def test_gradients_are_means_where_any_rank_has_one(shard: bool) -> None:
    """The first layer has one on both ranks, the second's bias on one alone, the third on none.

    Sharded, the mean is its owner's: chunks go round the ranks.
    """

    def run(group: Group) -> tuple[list[Any], list[bool]]:
        model, store = _store()
        rank, ranks = group.rank, Ranks(group.process_group, None, shard)
        with store.params_on_host():
            model[1].bias.grad = torch.full((8,), 99.0)
        store.clear_gradients()  # what was there before counts no more
        with store.params_on_host():
            model[0].weight.grad = torch.full((8, 8), 1.0 + rank)
            model[0].bias.grad = torch.full((8,), 3.0 * rank)
            if rank == 1:
                model[1].bias.grad = torch.full((8,), 10.0)
        ranks.average(store)
        with store.params_on_host():
            found = [
                None if p.grad is None else p.grad.flatten().unique().tolist() for p in model.parameters()
            ]
        return found, [ranks.owns(chunk) for chunk in store.chunks]

    (first, owns_first), (second, owns_second) = on_one_line(2, run)
    mean = [[1.5], [1.5], None, [5.0], None, None]
    if shard:
        assert (owns_first, owns_second) == ([True, False, True], [False, True, False])
        assert first[:2] == mean[:2]
        assert second[2:4] == mean[2:4]
    else:
        assert (owns_first, owns_second) == ([True] * 3, [True] * 3)
        assert first == second == mean


def test_what_an_owner_has_stepped_and_its_states_reach_the_others() -> None:
    def run(group: Group) -> tuple[Any, ...]:
        rank = group.rank
        model, store = _store()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
        ranks = Ranks(group.process_group, None, True)
        with store.params_on_host(), torch.no_grad():
            for layer in model:
                layer.weight.fill_(10.0 + rank)
                optimizer.state[layer.weight]["momentum_buffer"] = torch.full((8, 8), 1.0 + rank)
        ranks.drop_states(store.chunks, optimizer)
        kept = [layer.weight in optimizer.state for layer in model]
        for chunk in store.chunks:
            ranks.broadcast_params(store, chunk)
        ranks.gather_states(store.chunks, optimizer)
        with store.params_on_host():
            values = [layer.weight.unique().item() for layer in model]
        states = [optimizer.state[layer.weight]["momentum_buffer"].unique().item() for layer in model]
        return kept, values, states

    (kept_first, *first), (kept_second, *second) = on_one_line(2, run)
    assert (kept_first, kept_second) == ([True, False, True], [False, True, False])
    assert first == second == [[10.0, 11.0, 10.0], [1.0, 2.0, 1.0]]


def test_ranks_learn_what_all_have_seen_in_one_order() -> None:
    def seen(rank: int) -> list[AccessTrace]:
        return [AccessTrace((), (rank,), (), (), ())] * (rank + 1)

    found = on_one_line(3, lambda group: Ranks(None, group.process_group, False).agree(seen(group.rank)))
    assert found == [seen(0) + seen(1) + seen(2)] * 3


def test_one_process_alone_sends_nothing() -> None:
    _, store = _store()
    ranks = Ranks(None, None, shard=True)
    assert (ranks.size, ranks.rank, ranks.shard) == (1, 0, False)
    ranks.average(store)
    ranks.broadcast_params(store, store.chunks[0])
    ranks.gather_states(store.chunks, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    assert all(ranks.owns(chunk) for chunk in store.chunks)
