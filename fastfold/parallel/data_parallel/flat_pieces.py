"""An optimizer made for whole parameters, put to work on the flat pieces of them that ZeRO 1 and 2 leave a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.large_batch import LayerwiseOptimizer

Factory = Callable[[Mapping[str, nn.Parameter]], Optimizer]

_SIDE = 4
"""Length of each dimension of the parameters of a trial, where one of the same shape is larger."""
_LARGEST = 256
"""Longest side of a matrix in a trial: factored moments begin at 128 in the usual optimizers."""
_STEPS = 12
"""Steps of a trial."""


def on_pieces(
    factory: Factory, parameters: Mapping[str, nn.Parameter], pieces: Mapping[str, nn.Parameter]
) -> Optimizer:
    """The optimizer that a factory makes of whole parameters, with the same groups of their pieces.

    So a factory that sorts parameters by name or by dimensions sorts them as on one process.

    Args:
        factory: Makes an optimizer of parameters by name.
        parameters: Whole parameters.
        pieces: A flat piece ``[n]`` of each.

    Raises:
        ConfigError: The optimizer's update of a number depends on the rest of its parameter, which other ranks have.
    """
    optimizer = factory(parameters)
    if not isinstance(optimizer, LayerwiseOptimizer):
        _try(factory, parameters, type(optimizer).__name__)
    _replace(optimizer, {p: pieces[name] for name, p in parameters.items()})
    return optimizer


def _replace(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [replaced[parameter] for parameter in group["params"]]
    if isinstance(optimizer, LayerwiseOptimizer):
        optimizer.names = {replaced[parameter]: name for parameter, name in optimizer.names.items()}


def _try(factory: Factory, parameters: Mapping[str, nn.Parameter], kind: str) -> None:
    """Step stand-ins of the parameters and halves of them, which has to come to the same.

    Factored moments begin at a size and global scales after a warm-up: of each shape one stand-in is as large as the
    parameter, up to a limit, and there are several steps.
    """
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, ...]] = set()

    def trial(name: str) -> nn.Parameter:
        shape = _trial_shape(parameters[name].shape)
        if shape in seen:
            shape = tuple(min(_SIDE, length) for length in shape)
        seen.add(shape)
        return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

    whole = {name: trial(name) for name in parameters}
    same = {name: nn.Parameter(x.detach().clone()) for name, x in whole.items()}
    halves = {name: nn.Parameter(x.detach().flatten()[: x.numel() // 2].clone()) for name, x in whole.items()}
    stepped = factory(whole)
    in_halves = factory(same)
    _replace(in_halves, {x: halves[name] for name, x in same.items()})
    try:
        for _ in range(_STEPS):
            for name, x in whole.items():
                x.grad = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                halves[name].grad = x.grad.flatten()[: len(halves[name])].clone()
            stepped.step()
            in_halves.step()
            alike = all(
                torch.allclose(x.flatten()[: len(halves[name])], halves[name]) for name, x in whole.items()
            )
            if not alike:
                break
    except Exception:  # of whatever kind, it would end the run on the rank that has such a piece
        alike = False
    if not alike:
        raise ConfigError(
            f"{kind} looks at whole parameters or at all of them, and zero=1 and zero=2 leave each rank flat pieces; "
            "use zero=0"
        )


def _trial_shape(shape: torch.Size) -> tuple[int, ...]:
    """Limit the lengths of a shape, those of many dimensions more."""
    limit = _LARGEST if len(shape) <= 2 else _SIDE * 4
    return tuple(min(limit, length) for length in shape)
