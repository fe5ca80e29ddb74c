"""How many bytes an optimizer keeps for each element of a parameter."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from torch import Tensor, nn


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of states for each element of a parameter, counted where there are states, else found by a step on a probe.

    Args:
        optimizer: Any of ``torch.optim``; it is not changed.
    """
    most = 0
    for group in optimizer.param_groups:
        parameter = next((p for p in group["params"] if optimizer.state.get(p)), None)
        states = _probed(optimizer, group) if parameter is None else optimizer.state[parameter]
        shape = (8, 8) if parameter is None else parameter.shape
        tensors = [x for x in states.values() if isinstance(x, Tensor) and x.shape == shape]
        most = max(most, sum(x.element_size() for x in tensors))
    return most


def _probed(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> dict[str, object]:
    probe = nn.Parameter(torch.zeros(8, 8))
    probe.grad = torch.zeros(8, 8)
    twin = copy.copy(optimizer)
    twin.param_groups = [{**group, "params": [probe]}]
    twin.state = defaultdict(dict)
    twin.step()
    return dict(twin.state[probe])
