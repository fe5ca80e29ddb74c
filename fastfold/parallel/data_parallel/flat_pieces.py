"""Optimizers of whole parameters, applied to the flat pieces that ZeRO 1 and 2 leave on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.large_batch import LayerwiseOptimizer

Factory = Callable[[Mapping[str, nn.Parameter]], Optimizer]

_SIDE = 4  #: Length of each dimension of a small parameter in a trial
_LARGEST = 256  #: Longest side of a matrix in a trial; the usual optimizers factor moments from 128 on
_STEPS = 12  #: Number of steps of a trial


def on_pieces(
    factory: Factory, parameters: Mapping[str, nn.Parameter], pieces: Mapping[str, nn.Parameter]
) -> Optimizer:
    """Create the factory's optimizer and replace its parameters by their pieces, group by group.

    The factory sees whole parameters, so it may sort them by name or by number of dimensions. Each piece is flat,
    ``[n]``.

    Raises:
        ConfigError: The optimizer's update of an element depends on other elements of the parameter.
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
    """Check by a trial that the optimizer steps halves of parameters as it steps whole ones.

    Factored moments begin at a size, and global scales begin after a warm-up. So the trial takes several steps, and one
    stand-in of each shape is as large as its parameter, up to a limit.
    """
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, ...]] = set()

    def trial(name: str) -> nn.Parameter:
        shape: tuple[int, ...] = parameters[name].shape
        limit = _LARGEST if len(shape) <= 2 else _SIDE * 4
        shape = tuple(min(limit, length) for length in shape)
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
    except Exception:  # any error would otherwise end the run on one rank only
        alike = False
    if not alike:
        raise ConfigError(
            f"{kind} needs whole parameters, and zero=1 and zero=2 leave each rank flat pieces of them; use zero=0"
        )
