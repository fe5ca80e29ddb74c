"""An optimizer's step that takes place or not as a boolean on the device says, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.sharded_norm import local


def step_if(optimizer: Optimizer, ok: Tensor) -> Callable[[], None]:
    """Step, and where ``ok`` turns out to be false keep parameters and states bit by bit as they were.

    Counters of steps lie on the host, as PyTorch's optimizers have them, and are counted as if the step took place.

    Args:
        optimizer: Its states have been made before, and it changes them in place.
        ok: A boolean scalar on the parameters' device.

    Returns:
        Puts the counters back, to be called if the step did not take place and before the next one.

    Raises:
        ConfigError: The optimizer made new states, of which nobody knows what they were before.
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
            f"{type(optimizer).__name__} made states in a step that may turn out not to count; call initialise() of "
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
    """Fill ``values`` with what was ``kept`` of them, in place, unless ``ok``."""
    for x, old in zip(values, kept, strict=True):
        x.copy_(torch.where(ok, x, old))
