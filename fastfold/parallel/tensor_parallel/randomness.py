"""Random numbers under tensor parallelism: equal on all ranks for whole tensors, different for cut ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from fastfold.errors import ConfigError
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group


def draws(module: nn.Module) -> bool:
    """Return True if a module of a known class draws random numbers in training, without its children."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    rates = (x for name, x in vars(module).items() if "dropout" in name)
    return isinstance(module, nn.RReLU) or any(isinstance(x, float) and x > 0 for x in rates)


@contextmanager
def own_randomness(group: Group, device: torch.device) -> Iterator[None]:
    """Draw different numbers on each rank inside the context; afterwards all ranks continue alike.

    The generators are equal afterwards, whatever the number of draws of each rank. Generators are those of the device.
    """
    seed = int(torch.randint(1 << 62, ()))
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
        generator.manual_seed(seed + group.rank)
        yield


def check_alike(module: nn.Module, group: Group, cut: Iterable[str]) -> None:
    """Compare the ranks' generators in training before each call of a module that draws.

    Ranks with different numbers would drop different elements of one tensor, and diverge silently.

    The group works on the same tensors, except in the layers at the paths ``cut``, whose draws differ between ranks.
    """
    paths = tuple(cut)
    drawing = [
        name
        for name, part in module.named_modules()
        if draws(part) and not any(name == path or name.startswith(f"{path}.") for path in paths)
    ]
    if group.is_alone or not drawing:
        return

    def check(called: nn.Module, _: Any) -> None:
        if not called.training:
            return
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        if device.type == "cuda":
            state = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), state)
        found = async_ops.gather_numbers(torch.tensor(state, device=device), group)
        if not bool((found == state).all()):
            name = drawing[0] or type(module).__name__
            raise ConfigError(
                f"{name} draws numbers for one tensor on every rank of {group.name}, and the ranks' random number "
                "generators are in different states: call torch.manual_seed with the same number on them"
            )

    module.register_forward_pre_hook(check)
