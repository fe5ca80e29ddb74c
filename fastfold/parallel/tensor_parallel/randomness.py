"""Random numbers of cut layers: modules that draw them, and draws that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

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
