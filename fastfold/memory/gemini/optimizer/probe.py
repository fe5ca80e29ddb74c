"""Probe an optimizer with small parameters: its states, and whether it treats each parameter alone."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError

# Length of each dimension of a probe.
_SIDE = 4
# Steps of a trial; some optimizers read all gradients after a warm-up.
_STEPS = 12

Group = dict[str, Any]


def state_kinds(optimizer: Optimizer, group: Group) -> dict[str, torch.dtype | None]:
    """Return the dtypes of the states that are as large as their parameter, known or found by a trial step.

    None is the parameter's dtype. The optimizer is any of ``torch.optim``, and not changed; the group has at
    least one parameter.
    """
    known = next((p for p in group["params"] if optimizer.state.get(p)), None)
    if known is not None:
        states, shape, dtype = optimizer.state[known], known.shape, known.dtype
    else:
        first = group["params"][0]
        probe = _trial(first, torch.Generator().manual_seed(0))
        twin = _twin(optimizer, {first: probe})
        probe.grad = torch.zeros_like(probe)
        twin.step()
        states, shape, dtype = twin.state[probe], probe.shape, probe.dtype
    return {
        name: None if x.dtype == dtype else x.dtype
        for name, x in states.items()
        if isinstance(x, Tensor) and x.shape == shape and name != "step"
    }


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of states per parameter element, the largest over all groups."""
    return max(
        (
            sum(
                (dtype or group["params"][0].dtype).itemsize
                for dtype in state_kinds(optimizer, group).values()
            )
            for group in optimizer.param_groups
            if group["params"]
        ),
        default=0,
    )


def state_count(optimizer: Optimizer) -> int:
    """Return the number of states as large as their parameter, the largest over all groups."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    return max((len(state_kinds(optimizer, group)) for group in groups), default=0)


def check_steps_alone(optimizer: Optimizer) -> None:
    """Check that stepping small parameters one after the other equals stepping them together.

    Raises:
        ConfigError: The results differ, for example because the optimizer counts steps per group or reads all
            gradients.
    """
    why = None
    try:
        own, other = _trial_steps(optimizer, apart=False), _trial_steps(optimizer, apart=True)
        if not same(own, other, exact=False):
            why = "gives different results"
    except Exception as error:  # the first real step would raise it too
        why = f"raises {type(error).__name__}: {error}"
    if why is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be managed: stepping one chunk of parameters after the other {why}. "
            "Use an optimizer that treats each parameter alone, such as AdamW, and clip with clip_grad_norm_() of the "
            "manager"
        )


def _trial_steps(optimizer: Optimizer, *, apart: bool) -> list[Any]:
    """Step small parameters in place of the first and the last one of each group, together or apart.

    Returns the parameters, their states, and the settings of the groups.
    """
    generator = torch.Generator().manual_seed(0)
    chosen = [list(dict.fromkeys([*g["params"][:1], *g["params"][-1:]])) for g in optimizer.param_groups]
    probes = {p: _trial(p, generator) for group in chosen for p in group}
    twin = _twin(optimizer, probes)
    turns = [[group[:1] for group in chosen], [group[1:] for group in chosen]] if apart else [chosen]
    for _ in range(_STEPS):
        for probe in probes.values():
            probe.grad = torch.randn(probe.shape, generator=generator, dtype=probe.dtype)
        for turn in turns:
            for group, parameters in zip(twin.param_groups, turn, strict=True):
                group["params"] = [probes[p] for p in parameters]
            twin.step()
    numbers = [{name: x for name, x in group.items() if name != "params"} for group in twin.param_groups]
    return [*((p.detach(), dict(twin.state[p])) for p in probes.values()), *numbers]


def _trial(parameter: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    """Return a small parameter of the same rank, with a dtype that separate states do not have."""
    return nn.Parameter(torch.randn([_SIDE] * parameter.dim(), generator=generator, dtype=torch.float64))


def _twin(optimizer: Optimizer, probes: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
    """Return the optimizer with probes as its only parameters, without hooks."""
    # Copying an optimizer would lose attributes of schedulers, hooks and subclasses.
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    for p, probe in probes.items():
        if optimizer.state.get(p):
            twin.state[probe] = _small_states(optimizer.state[p], p, probe)
    small = nn.Parameter(torch.zeros(1))
    memo = {id(p): probes.get(p, small) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):
            setattr(twin, name, copy.deepcopy(value, memo))
    twin.param_groups = []
    for group in optimizer.param_groups:
        made = {name: copy.deepcopy(x, memo) for name, x in group.items() if name != "params"}
        if made.get("capturable"):
            made["capturable"] = False  # needs a GPU
        twin.param_groups.append({**made, "params": [probes[p] for p in group["params"] if p in probes]})
    return twin


def _small_states(states: Mapping[str, Any], parameter: nn.Parameter, probe: nn.Parameter) -> dict[str, Any]:
    """Return states for a probe in place of a parameter's, for optimizers that create them in advance.

    States as large as the parameter become zeros, and numbers are copied. Empty if a state has another shape, as in
    optimizers with factored moments, which create their states in a step.
    """
    small: dict[str, Any] = {}
    for name, value in states.items():
        if not isinstance(value, Tensor):
            small[name] = copy.deepcopy(value)
        elif value.shape == parameter.shape and name != "step":
            # Of the parameter's dtype, as a step on the probe would create it.
            dtype = probe.dtype if value.dtype == parameter.dtype else value.dtype
            small[name] = torch.zeros(probe.shape, dtype=dtype)
        elif value.numel() == 1:
            small[name] = value.detach().cpu().clone()
        else:
            return {}
    return small


def same(a: Any, b: Any, *, exact: bool) -> bool:
    """Compare an optimizer's states: nested lists, tuples and dicts of tensors and numbers.

    ``exact`` requires bitwise equality; otherwise rounding is allowed.
    """
    if isinstance(a, Tensor):
        close = torch.equal if exact else partial(torch.allclose, rtol=1e-9, atol=1e-12)
        return isinstance(b, Tensor) and bool(close(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name], exact=exact) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, exact=exact) for x, y in zip(a, b, strict=True))
    return bool(a == b)
