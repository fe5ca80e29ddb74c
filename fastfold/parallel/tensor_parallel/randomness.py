"""Random numbers under tensor parallelism: alike where every rank has the same tensor, each its own where it is cut."""

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
    """Whether a module by itself draws random numbers in training, as far as its kind and its attributes tell."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    rates = (x for name, x in vars(module).items() if "dropout" in name)
    return isinstance(module, nn.RReLU) or any(isinstance(x, float) and x > 0 for x in rates)


@contextmanager
def own_randomness(group: Group, device: torch.device) -> Iterator[None]:
    """Inside, each rank draws numbers of its own; afterwards all go on alike, however many each has drawn.

    Args:
        group: Ranks whose generators are in the same state.
        device: Where numbers are drawn.
    """
    seed = int(torch.randint(1 << 62, ()))
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
        generator.manual_seed(seed + group.rank)
        yield


def check_alike(module: nn.Module, group: Group, cut: Iterable[str]) -> None:
    """From now on, in training, compare the ranks' generators before each call of a module that draws.

    Ranks with other numbers would each drop something else of a tensor that is one, and drift apart without notice.

    Args:
        module: What is called.
        group: Ranks that work on the same tensors.
        cut: Paths of the layers that the ranks share; what is drawn in them is each rank's own.
    """
    paths = tuple(cut)
    drawing = [
        name
        for name, part in module.named_modules()
        if draws(part) and not any(name == path or name.startswith(f"{path}.") for path in paths)
    ]
    if group.size == 1 or group.backend == "fake" or not drawing:
        return

    def check(called: nn.Module, _: Any) -> None:
        if not called.training:
            return
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        if device.type == "cuda":
            state = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), state)
        own = torch.tensor([state], device=device)
        found = async_ops.start_gather(own, 0, group, [1] * group.size).wait()
        if not bool((found == state).all()):
            name = drawing[0] or type(module).__name__
            raise ConfigError(
                f"{name} is drawn on every rank of {group.name} for one and the same tensor, and their random number "
                "generators are in different states: call torch.manual_seed with the same number on them"
            )

    module.register_forward_pre_hook(check)
