"""The GPT of the examples in double precision: a step on one process, and the same step under a plan."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.gpt.gpt import GPT, GPTConfig, next_token_loss
from examples.gpt.parallel import sequence_parallel, split_stages, tensor_layers
from fastfold.errors import ConfigError
from fastfold.parallel import Parallel, ParallelPlan, parallelize
from fastfold.parallel.data_parallel import buckets
from fastfold.parallel.data_parallel.large_batch import Lamb, Lars

# Nothing divides by 2: 3 heads, 13 tokens, a batch of 5 rows with 7 positions.
ROWS, LENGTH, VOCABULARY = 5, 7, 13
BUCKET = 500  # several buckets, some of which end inside of a parameter's shard

OPTIMIZERS: dict[str, Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda named: torch.optim.Adam(named.values(), lr=1e-2, eps=1e-6),
    "sgd": lambda named: torch.optim.SGD(named.values(), lr=0.1, momentum=0.9),
    "lamb": lambda named: Lamb(named, lr=1e-2, weight_decay=0.1, weight_norms=(0.05, 100.0)),
    "lars": lambda named: Lars(named, lr=1.0, weight_decay=0.1, trust=0.05),
}


def make_gpt(*, tied: bool = True, layers: int = 2, unused: bool = False) -> GPT:
    """The same random weights everywhere, none of them near its neutral value.

    With ``unused`` there are two parameters more: ``sometimes``, which only the first row's loss uses, and ``never``.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCABULARY, 8, layers, 3, 12, tied)).double()
    if unused:
        model.sometimes = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
        model.never = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(parameter.shape[-1], 4) ** 0.5 + 0.1)
    return model


def make_tokens(step: int = 0) -> Tensor:
    """A batch that all ranks know, int64 ``[ROWS, LENGTH]``."""
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def make_parallel(
    plan: ParallelPlan | dict[str, Any], *, tied: bool | None = None, unused: bool = False, **more: Any
) -> Parallel:
    """The model under a plan; tied if the plan can have it."""
    plan = plan if isinstance(plan, ParallelPlan) else ParallelPlan.from_dict(plan)
    if tied is None:
        tied = is_tied(plan)
    settings = {
        "layers": tensor_layers(plan) if plan.tp > 1 else None,
        "sequence": sequence_parallel,
        "stages": split_stages,
    }
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", BUCKET):
        return parallelize(make_gpt(tied=tied, unused=unused), plan, **(settings | more))


def is_tied(plan: ParallelPlan) -> bool:
    """Whether the tests tie output layer and embedding under this plan."""
    return plan.tp_mode == "1d"


def has_unused(plan: ParallelPlan) -> bool:
    """Whether the tests have parameters that some or all ranks don't use."""
    return plan.pp == 1 and plan.tp_mode == "1d" and plan.zero < 3


def parallel_loss(parallel: Parallel, tokens: Tensor) -> Tensor:
    """This rank's share of the mean loss over all tokens but each row's first."""
    rows = parallel.rows(len(tokens))
    tokens = tokens[rows]
    targets = torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), -100)], 1)
    if parallel.sequence is not None:
        targets = parallel.sequence.shard(targets)
        tokens = parallel.sequence.shard(tokens)
    scores = parallel.module(tokens)
    count = int((targets >= 0).sum())
    total = nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")
    loss = total / max(count, 1) * parallel.loss_share(count)
    if hasattr(parallel.module, "sometimes") and rows.start == 0 and parallel.mesh.group("sp").rank == 0:
        loss = loss + first_row_loss(parallel.module)
    return loss


def first_row_loss(model: nn.Module) -> Tensor:
    """What the parameter adds to the loss that only one rank uses."""
    sometimes: Any = model.sometimes
    return (sometimes - 1).square().mean()


def plain_step(model: GPT, tokens: Tensor) -> Tensor:
    """Forward and backward on one process."""
    loss = next_token_loss(model(tokens), tokens)
    if hasattr(model, "sometimes"):
        loss = loss + first_row_loss(model)
    loss.backward()
    return loss.detach()


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number expected."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() / (scale or 1.0)


def gradients(parallel: Parallel) -> dict[str, Tensor]:
    """The plain model's gradients, of what the optimizer is about to use."""
    found = {name: p.grad for name, p in parallel.gradients.optimized.items() if p.grad is not None}
    return parallel.plain(parallel.gradients.whole(found))


def largest_differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of all tensors that are found; every expected one has to be there."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(difference(found[name], expected[name].detach()) for name in expected)


class Reference:
    """Steps of the plain model on one process."""

    def __init__(self, plan: ParallelPlan, optimizer: str, *, unused: bool = False) -> None:
        self.model = make_gpt(tied=is_tied(plan), unused=unused)
        self.optimizer = OPTIMIZERS[optimizer](dict(self.model.named_parameters()))

    def step(self, number: int) -> dict[str, Tensor]:
        """One step; its gradients."""
        self.optimizer.zero_grad()
        plain_step(self.model, make_tokens(number))
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        return found

    def states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter name."""
        return {
            name: {key: x for key, x in self.optimizer.state[p].items() if isinstance(x, Tensor)}
            for name, p in self.model.named_parameters()
        }


def flat(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Nested tensors by one name, of an optimizer's state or of its ``state`` alone."""
    states = states.get("state", states)
    return {f"{name}.{key}": x for name, of_one in states.items() for key, x in of_one.items()}


def three_steps(plan: ParallelPlan, optimizer: str, *, overlapped: bool = False) -> float:
    """Largest difference in loss, gradients, parameters and optimizer state over three steps."""
    unused = has_unused(plan)
    reference, parallel = Reference(plan, optimizer, unused=unused), make_parallel(plan, unused=unused)
    inner = parallel.optimizer(OPTIMIZERS[optimizer])
    worst = 0.0
    for number in range(3):
        expected = reference.step(number)
        inner.zero_grad()
        with parallel.overlapped() if overlapped else nullcontext():
            parallel_loss(parallel, make_tokens(number)).backward()
        parallel.reduce_gradients()
        worst = max(worst, largest_differences(gradients(parallel), expected))
        inner.step()
    worst = max(worst, largest_differences(parallel.state_dict(), reference.model.state_dict()))
    return max(worst, largest_differences(flat(inner.state_dict()), flat(reference.states())))


def one_step_differences(plan: ParallelPlan, optimizer: str) -> Callable[[], float]:
    """A function that takes one step of new models and gives the largest difference of gradients and parameters."""
    reference = Reference(plan, optimizer, unused=has_unused(plan))
    expected = reference.step(0)
    wanted = copy.deepcopy(reference.model.state_dict())

    def run() -> float:
        parallel = make_parallel(plan, unused=has_unused(plan), compare_first=False)
        inner = parallel.optimizer(OPTIMIZERS[optimizer])
        parallel_loss(parallel, make_tokens(0)).backward()
        try:
            parallel.reduce_gradients()
        except ConfigError:  # raised on all ranks, which have compared their gradients
            return math.inf
        found = gradients(parallel)
        alike = torch.tensor(float(found.keys() == expected.keys()))
        if dist.is_initialized():  # every rank steps, or none
            dist.all_reduce(alike, dist.ReduceOp.MIN)
        if not alike:
            return math.inf
        worst = largest_differences(found, expected)
        inner.step()
        return max(worst, largest_differences(parallel.state_dict(), wanted))

    return run
