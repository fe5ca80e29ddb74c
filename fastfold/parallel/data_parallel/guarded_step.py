"""An optimizer's step that takes place or not as a boolean on the device says, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastfold.parallel.data_parallel.sharded_norm import local


def step_if(optimizer: Optimizer, ok: Tensor) -> Callable[[], None]:
    """Step, and where ``ok`` turns out to be false keep parameters and states bit by bit as they were.

    Counters of steps lie on the host, as PyTorch's optimizers have them, and are counted as if the step took place.

    Args:
        optimizer: Its states have been made before.
        ok: A boolean scalar on the parameters' device.

    Returns:
        Puts the counters back, to be called if the step did not take place and before the next one.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    states = [x for p in parameters for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    counters = [x for x in states if x.dim() == 0 and x.device.type == "cpu"]
    of_host = {id(x) for x in counters}
    values = [local(x).detach() for x in (*parameters, *states) if id(x) not in of_host]
    kept, counts = [x.clone() for x in values], [x.clone() for x in counters]
    optimizer.step()
    keep_unless(ok, values, kept)

    def undo() -> None:
        for x, count in zip(counters, counts, strict=True):
            x.copy_(count)

    return undo


@torch.no_grad()
def keep_unless(ok: Tensor, values: list[Tensor], kept: list[Tensor]) -> None:
    """Fill ``values`` with what was ``kept`` of them, in place, unless ``ok``."""
    for x, old in zip(values, kept, strict=True):
        x.copy_(torch.where(ok, x, old))
