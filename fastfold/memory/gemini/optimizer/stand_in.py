"""Step parameters through stand-in tensors, without touching the parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.memory.gemini.optimizer.probe import Group, trial_difference


def step_stand_ins(
    optimizer: Optimizer, groups: Sequence[Group], views: Mapping[nn.Parameter, tuple[Tensor, Tensor]]
) -> None:
    """Step parameters on their host copies, while the parameters themselves are not on the host.

    Only the optimizer's states of these parameters change, so other code may read the optimizer meanwhile.

    Args:
        optimizer: Optimizer that treats each parameter alone.
        groups: Its groups, with only the parameters to step.
        views: Values and gradient of each parameter; the values are changed.
    """
    made = {p: nn.Parameter(numbers.detach()) for p, (numbers, _) in views.items()}
    twin = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):
            # Attributes by parameter, such as names, also apply to the stand-ins.
            known = isinstance(value, dict) and {made.get(key, key): x for key, x in value.items()}
            setattr(twin, name, known or value)
    twin.state = defaultdict(dict, {made[p]: optimizer.state[p] for p in views if p in optimizer.state})
    twin.param_groups = []
    for group in groups:
        for p in group["params"]:
            made[p].grad = views[p][1]
        twin.param_groups.append({**group, "params": [made[p] for p in group["params"]]})
    twin.step()
    for p, stand_in in made.items():
        if stand_in in twin.state:
            optimizer.state[p] = twin.state[stand_in]


def check_stand_ins(optimizer: Optimizer) -> None:
    """Check that stepping stand-ins equals stepping the parameters bitwise.

    Args:
        optimizer: Any of ``torch.optim``; it is not changed.

    Raises:
        ConfigError: The results differ, for example because the optimizer keeps data outside ``optimizer.state``.
    """
    why = trial_difference(optimizer, _step_by_stand_ins, exact=True)
    if why is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be stepped during the backward pass: a step on other tensors with the "
            f"same values {why}. Use an optimizer that keeps its data in its states, such as AdamW, or set "
            "overlap_optimizer=False"
        )


def _step_by_stand_ins(optimizer: Optimizer) -> None:
    views = {p: (p.detach(), p.grad) for group in optimizer.param_groups for p in group["params"]}
    step_stand_ins(optimizer, optimizer.param_groups, views)
    parameters = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.step()  # as at the end, after all parameters were stepped
    for group, own in zip(optimizer.param_groups, parameters, strict=True):
        group["params"] = own
