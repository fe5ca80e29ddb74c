"""Pipelines of a GPT and of the Evoformer stack: every schedule gives the step of one process, recycling included."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.gpt.parallel import split_stages
from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import EvoformerStack
from fastfold.parallel import Parallel, ParallelPlan, alphafold, parallelize
from fastfold.parallel.comm.collectives import all_reduce
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel import buckets
from fastfold.parallel.pipeline import Pipeline, split_blocks
from tests.helpers.drop_reductions import undetected_reductions
from tests.helpers.networks import oracle_config
from tests.helpers.spawn_ranks import launch, on_first_rank
from tests.parallel.alphafold.axial_networks import BLIND, small_network
from tests.parallel.gpt_case import (
    OPTIMIZERS,
    VOCABULARY,
    difference,
    flat,
    gradients,
    largest_differences,
    make_gpt,
)

MICROBATCHES, LENGTH = 4, 7
CLIP = 0.1


def _two_each(model: nn.Module, ranks: int) -> list[nn.Module]:
    return split_stages(model, 2 * ranks)


# ---- GPT -------------------------------------------------------------------------------------------------


def _tokens(step: int, replicas: int) -> Tensor:
    """For each replica and microbatch two rows."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (replicas, MICROBATCHES, 2, LENGTH), generator=generator)


def _loss(scores: Tensor, tokens: Tensor) -> Tensor:
    """Sum over tokens."""
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def _pipelined(parallel: Parallel, pipeline: Pipeline, step: int) -> float:
    tokens = _tokens(step, parallel.plan.dp)[parallel.mesh.group("dp").rank]
    share = parallel.loss_share(tokens[..., 1:].numel()) / tokens[..., 1:].numel()
    losses = pipeline.step([(one,) for one in tokens], lambda scores, i: share * _loss(scores, tokens[i]))
    parallel.reduce_gradients()
    return float(sum(losses))


class _Reference:
    def __init__(self, plan: ParallelPlan, optimizer: str) -> None:
        self.model, self.plan = make_gpt(tied=False, layers=5), plan
        self.optimizer = OPTIMIZERS[optimizer](dict(self.model.named_parameters()))

    def step(self, number: int) -> tuple[float, dict[str, Tensor]]:
        self.optimizer.zero_grad()
        tokens = _tokens(number, self.plan.dp).flatten(0, 2)
        loss = _loss(self.model(tokens), tokens) / tokens[:, 1:].numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        assert float(norm) > CLIP
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        return loss.item(), found


def _gpt(plan: ParallelPlan, schedule: str, optimizer: str, steps: int) -> float:
    """Largest difference over some steps: loss, clipped gradients, parameters, optimizer state."""
    reference = _Reference(plan, optimizer)
    split = split_stages if schedule in ("gpipe", "1f1b") else _two_each
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 1000):
        parallel = parallelize(make_gpt(tied=False, layers=5), plan, stages=split)
    pipeline = Pipeline(parallel, schedule)
    inner = parallel.optimizer(OPTIMIZERS[optimizer])
    worst = 0.0
    for number in range(steps):
        inner.zero_grad()
        loss = torch.tensor(_pipelined(parallel, pipeline, number), dtype=torch.float64)
        torch.distributed.all_reduce(loss)
        parallel.clip_grad_norm_(CLIP)
        expected_loss, expected = reference.step(number)
        worst = max(
            worst, abs(loss.item() - expected_loss), largest_differences(gradients(parallel), expected)
        )
        inner.step()
    worst = max(worst, largest_differences(parallel.state_dict(), reference.model.state_dict()))
    states = {
        name: {key: x for key, x in reference.optimizer.state[p].items() if isinstance(x, Tensor)}
        for name, p in reference.model.named_parameters()
    }
    worst = max(worst, largest_differences(flat(inner.state_dict()), flat(states)))
    # And all of it comes back.
    again = parallelize(make_gpt(tied=False, layers=5), plan, stages=split)
    again.load_state_dict(reference.model.state_dict())
    optimizer_again = again.optimizer(OPTIMIZERS[optimizer])
    optimizer_again.load_state_dict({"state": states, "param_groups": []})
    worst = max(worst, largest_differences(again.state_dict(), reference.model.state_dict()))
    return max(worst, largest_differences(flat(optimizer_again.state_dict()), flat(states)))


def _schedules(cases: Sequence[tuple[ParallelPlan, str, str, int]]) -> list[float]:
    return [_gpt(*case) for case in cases]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (
            2,
            [
                (ParallelPlan(pp=2), "1f1b", "lamb", 3),
                (ParallelPlan(pp=2), "interleaved", "adam", 1),
                (ParallelPlan(pp=2), "zero_bubble", "adam", 2),
            ],
        ),
        pytest.param(
            4,
            [
                (ParallelPlan(pp=2, dp=2, zero=1), "1f1b", "lamb", 3),
                (ParallelPlan(pp=4), "gpipe", "lars", 3),
                (ParallelPlan(pp=2, dp=2, zero=1), "zero_bubble", "lamb", 3),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_schedule_trains_a_gpt_as_one_process_does(
    size: int, cases: Sequence[tuple[ParallelPlan, str, str, int]]
) -> None:
    """Clipped by the norm over all stages; five blocks, which no number of stages here divides."""
    for found in launch(_schedules, size, cases, timeout=250):
        assert max(found) < 1e-12, list(zip(cases, found, strict=True))


def _mutations() -> tuple[int, list[str]]:
    """The stages reduce other gradients, in other numbers."""
    return undetected_reductions(lambda: _gpt(ParallelPlan(pp=2, dp=2), "1f1b", "lamb", 1), apart=True)


@pytest.mark.slow
def test_every_reduction_is_needed() -> None:
    reductions, undetected = launch(_mutations, 4, timeout=280)[0]
    # In both groups of dp the share of the loss, the used parameters, and the buckets of a stage (5 and 4); in both
    # groups of pp the norm.
    assert reductions == 2 * 2 + 5 + 4 + 2
    # The first stage has no loss, and so no use for its share of it. Which parameters any rank used (number 1) is the
    # same everywhere here; test_apply_plan.py leaves that sum out where it is not.
    assert undetected == [
        "0: start_all_reduce over dp of ranks [0, 1]",
        "1: start_all_reduce over dp of ranks [0, 1]",
        "1: start_all_reduce over dp of ranks [2, 3]",
    ]


# ---- Evoformer -------------------------------------------------------------------------------------------

Case = list[tuple[Tensor, Tensor]]


def _stack() -> EvoformerStack:
    return small_network("synthetic_monomer", blocks=3).evoformer.eval()


def _proteins() -> tuple[Case, list[tuple[Tensor, Tensor]]]:
    """MSA and pair of three microbatches, with masks; 5 sequences of 7 residues."""
    generator = torch.Generator().manual_seed(3)
    trunk = oracle_config().model.embeddings_and_evoformer
    c_m, c_z = trunk.msa_channel, trunk.pair_channel

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    states = [(random(5, 7, c_m), random(7, 7, c_z)) for _ in range(3)]
    masks = []
    for number in range(3):
        rows = torch.ones(5, 7, dtype=torch.float64)
        rows[number, 4:] = 0
        present = torch.ones(7, dtype=torch.float64)
        present[7 - number :] = 0
        masks.append((rows * present, present[:, None] * present))
    return states, masks


def _next(state: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """What a cycle starts from: the features' state and what the cycle before left (no gradient flows into it)."""
    if before is None:
        return state
    first, second = (0.3 * torch.tanh(x.detach()) for x in before)
    return state[0] + first, state[1] + second


def _of(state: tuple[Tensor, Tensor]) -> Tensor:
    return state[0].sin().sum() + (state[1] * state[1].cos()).sum()


class _StackStage(nn.Module):
    """Consecutive blocks of a stack; masks are given to every stage, not sent."""

    def __init__(self, stack: EvoformerStack, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stack = copy.copy(stack)
        self.stack._modules = {"blocks": nn.ModuleList(blocks)}

    def forward(self, *state: Tensor, masks: Sequence[Tensor]) -> Any:
        return self.stack(*state, *masks)


def _stack_stages(stack: nn.Module, count: int) -> list[nn.Module]:
    return [_StackStage(stack, blocks) for blocks in split_blocks(list(stack.blocks), count)]


def _to_first(results: Sequence[Case], like: Sequence[Case], group: Group) -> list[Case]:
    """The results of the last stage on the rank of the first; other ranks do not use theirs."""
    if group.rank == 0:
        results = [tuple(torch.empty_like(x) for x in one) for one in like]
    for x in itertools.chain(*results):
        if group.rank == 0:
            dist.recv(x, group=group.process_group, group_src=group.size - 1)
        else:
            dist.send(x.contiguous(), group=group.process_group, group_dst=0)
    return list(results) or list(like)


def _recycled(cycles: int) -> tuple[list[Tensor | None], list[tuple[Tensor | None, ...]], list[float]]:
    """One process: gradients of the stack and of the states of the features, and losses."""
    stack = _stack()
    states, masks = _proteins()
    states = [(m.requires_grad_(), z.requires_grad_()) for m, z in states]
    losses = []
    for state, mask in zip(states, masks, strict=True):
        before = None
        for cycle in range(cycles):
            with torch.set_grad_enabled(cycle == cycles - 1):
                before = stack(*_next(state, before), *mask)
        loss = _of(before)
        loss.backward()
        losses.append(loss.item())
    return [p.grad for p in stack.parameters()], [(m.grad, z.grad) for m, z in states], losses


def _evoformer(plan: ParallelPlan, cycles: int) -> dict[str, float]:
    expected = _stack()
    wanted_gradients, inputs, losses = on_first_rank(lambda: _recycled(cycles))
    for parameter, gradient in zip(expected.parameters(), wanted_gradients, strict=True):
        parameter.grad = gradient
    parallel = parallelize(_stack(), plan, stages=_stack_stages, dap=alphafold.shard)
    pipeline = Pipeline(parallel)
    group = parallel.mesh.group("dap")
    states, masks = _proteins()
    # With DAP a rank has some sequences of the MSA and some rows of the pair.
    rows, residues = group.shard(5), group.shard(7)
    own = [(m[rows].clone().requires_grad_(), z[residues].clone().requires_grad_()) for m, z in states]
    everywhere = [{"masks": mask} for mask in masks]
    before: list[Any] = [None] * len(own)
    for _ in range(cycles - 1):
        with torch.no_grad():
            given = [_next(state, b) for state, b in zip(own, before, strict=True)]
        before = _to_first(pipeline.evaluate(given, everywhere), own, pipeline.group)
    given = [_next(state, b) for state, b in zip(own, before, strict=True)]
    found = pipeline.step(given, lambda state, _: _of(state), everywhere)
    parallel.reduce_gradients()

    wanted = {name: p.grad for name, p in expected.named_parameters() if p.grad is not None}
    largest = max(g.abs().max().item() for g in wanted.values())
    ours = gradients(parallel)
    worst = {
        name: (ours[name] - g).abs().max().item()
        / (largest if name.endswith(BLIND) else max(g.abs().max().item(), 1e-9 * largest))
        for name, g in wanted.items()
    }
    if pipeline.group.rank == 0:
        for (m, z), (right_m, right_z) in zip(own, inputs, strict=True):
            for x, right, part in ((m, right_m, rows), (z, right_z, residues)):
                assert x.grad is not None
                assert right is not None
                worst["input"] = max(worst.get("input", 0.0), difference(x.grad, right[part]))
    if pipeline.has_last:
        for ours_of_one, right_of_one in zip(found, losses, strict=True):
            loss = all_reduce(ours_of_one.detach(), group).item()
            worst["loss"] = max(worst.get("loss", 0.0), abs(loss - right_of_one) / abs(right_of_one))

    optimizer = parallel.optimizer(OPTIMIZERS["lamb"])
    plain = OPTIMIZERS["lamb"](dict(expected.named_parameters()))
    plain.step()
    optimizer.step()
    state = parallel.state_dict()
    # A step that is scaled by its own length makes a step of rounding, where the gradient is nothing else.
    return worst | {
        f"{name} after a step": difference(state[name], x)
        for name, x in expected.state_dict().items()
        if not name.endswith(BLIND)
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("plan", "cycles"), [(ParallelPlan(pp=2), 3), (ParallelPlan(pp=2, dap=2), 2)], ids=["pp", "pp x dap"]
)
def test_the_evoformer_stack_recycles_through_a_pipeline(plan: ParallelPlan, cycles: int) -> None:
    """Cycles without gradient run forward only, the last one forward and backward; also on shards (pp 2 x dap 2).

    Losses, gradients of parameters and inputs, and the parameters after a step whose length depends on norms.
    """
    for rank, worst in enumerate(launch(_evoformer, plan.ranks, plan, cycles, timeout=250)):
        name = max(worst, key=lambda key: worst[key])
        assert worst[name] < 1e-12, f"rank {rank}: {name} differs by {worst[name]}"
        assert ("input" in worst) == (rank < plan.dap)
        assert ("loss" in worst) == (rank >= plan.dap)


# ---- refusals --------------------------------------------------------------------------------------------


def _refusals() -> Mapping[str, str]:
    parallel = parallelize(make_gpt(tied=False), {"pp": 2}, stages=split_stages)
    pipeline = Pipeline(parallel)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    found = {}
    for name, call in {
        "name": lambda: Pipeline(parallel, "2f2b"),
        "stages": lambda: Pipeline(parallel, "interleaved"),
        "few": lambda: pipeline.step([(tokens,)], lambda scores, i: scores.sum()),
        "shapes": lambda: pipeline.step([(tokens,), (tokens[:1],)], lambda scores, i: scores.sum()),
        "zero": lambda: parallelize(make_gpt(tied=False), {"pp": 2, "zero": 2}, stages=split_stages),
    }.items():
        try:
            call()
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_what_cannot_run_is_refused_on_every_rank() -> None:
    for found in launch(_refusals, 2):
        assert "one of gpipe, 1f1b, interleaved, zero_bubble, found '2f2b'" in found["name"]
        assert "expected at least two stages on each rank, found 1" in found["stages"]
        assert "expected at least 2 microbatches for pp=2, found 1" in found["few"]
        assert (
            "microbatch 1 of a pipeline: expected tensors [(2, 3)] as in the first, found [(1, 3)]"
            in found["shapes"]
        )
        assert "zero=2 with pp=2" in found["zero"]
    with pytest.raises(ConfigError, match="2 blocks cannot be split into 3"):
        split_blocks([nn.Identity(), nn.Identity()], 3)
    with pytest.raises(ConfigError, match="needs a plan with pp of at least 2"):
        Pipeline(parallelize(copy.deepcopy(make_gpt()), {}))


# ---- weights that change between steps -------------------------------------------------------------------


def _other_weights_between_steps() -> float:
    """Load a state before the first step and after it, and limit the weights after each step."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))).double()
    other = {name: 0.5 * x for name, x in plain.state_dict().items()}
    parallel = parallelize(
        copy.deepcopy(plain),
        {"pp": 2},
        stages=lambda model, _: list(model.children()),
    )
    pipeline = Pipeline(parallel)
    x = torch.randn(4, 4, dtype=torch.float64)
    ours = parallel.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain.load_state_dict(other)
        parallel.load_state_dict(other)
        optimizer.zero_grad()
        ours.zero_grad()
        plain(x).square().sum().backward()
        pipeline.step([(x[:2],), (x[2:],)], lambda y, _: y.square().sum())
        parallel.reduce_gradients()
        optimizer.step()
        ours.step()
        with torch.no_grad():
            for parameter in (*plain.parameters(), *parallel.parameters()):
                parameter.clamp_(-0.2, 0.2)
    state = parallel.state_dict()
    return max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items())


def test_weights_may_change_between_the_steps_of_a_pipeline() -> None:
    assert max(launch(_other_weights_between_steps, 2)) < 1e-12
