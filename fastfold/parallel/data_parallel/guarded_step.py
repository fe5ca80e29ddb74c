"""Optimizer steps that a boolean on the device may cancel, without a wait of the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.sharded_norm import local


def step_if(optimizer: Optimizer, ok: Tensor) -> Callable[[], None]:
    """Step the optimizer, and restore parameters and states bit by bit where ``ok`` is false.

    PyTorch's optimizers keep their step counters on the host. These count the step whether or not it is cancelled.

    Args:
        optimizer: Its states exist already, and it changes them in place.
        ok: A boolean scalar on the parameters' device.

    Returns:
        A function that restores the counters. Call it before the next step if the step was cancelled.

    Raises:
        ConfigError: The optimizer made new states, whose earlier values are unknown.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    states = _states(optimizer, parameters)
    counters = [x for x in states if x.dim() == 0 and x.device.type == "cpu"]
    of_host = {id(x) for x in counters}
    values = [local(x).detach() for x in (*parameters, *states) if id(x) not in of_host]
    kept, counts = [x.clone() for x in values], [x.clone() for x in counters]
    optimizer.step()
    if {id(x) for x in _states(optimizer, parameters)} != {id(x) for x in states}:
        raise ConfigError(
            f"{type(optimizer).__name__} made new states in a step that may be cancelled; call initialise() of "
            "the optimizer before the first step, or step() without ok"
        )
    keep_unless(ok, values, kept)

    def undo() -> None:
        for x, count in zip(counters, counts, strict=True):
            x.copy_(count)

    return undo


def _states(optimizer: Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [x for p in parameters for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]


@torch.no_grad()
def keep_unless(ok: Tensor, values: list[Tensor], kept: list[Tensor]) -> None:
    """Overwrite ``values`` in place with ``kept`` unless ``ok``."""
    for x, old in zip(values, kept, strict=True):
        x.copy_(torch.where(ok, x, old))
