"""A step of some of an optimizer's parameters on tensors of their own, without touching the parameters themselves."""

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
    """Step parameters where their numbers are, though the parameters themselves are elsewhere.

    The optimizer is not changed but for its states of these parameters, so that others may look at it meanwhile.

    Args:
        optimizer: Treats each parameter alone.
        groups: Its groups, of whose parameters those alone that are stepped.
        views: Numbers and gradient of each parameter; the numbers are changed.
    """
    made = {p: nn.Parameter(numbers.detach()) for p, (numbers, _) in views.items()}
    twin = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):
            # What is known of parameters by themselves, such as their names, is known of those in their place.
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
    """Try out whether steps of stand-ins come to the same bits as steps of the parameters.

    Args:
        optimizer: It is not changed.

    Raises:
        ConfigError: They do not: the optimizer keeps what it remembers elsewhere than in ``optimizer.state``, say.
    """
    why = trial_difference(optimizer, _step_by_stand_ins, exact=True)
    if why is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be stepped beside the backward pass: a step on other tensors with the "
            f"same numbers {why}. Use an optimizer that keeps what it remembers in its states, such as AdamW, or set "
            "overlap_optimizer=False"
        )


def _step_by_stand_ins(optimizer: Optimizer) -> None:
    views = {p: (p.detach(), p.grad) for group in optimizer.param_groups for p in group["params"]}
    step_stand_ins(optimizer, optimizer.param_groups, views)
    parameters = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.step()  # as in the end, when all have been stepped
    for group, own in zip(optimizer.param_groups, parameters, strict=True):
        group["params"] = own
