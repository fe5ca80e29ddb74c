"""Units of stage 3: the parts of a module that are gathered one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fastfold.errors import ConfigError


def listed_modules(module: nn.Module) -> list[nn.Module]:
    """Return the members of every ``nn.ModuleList`` in a module: the blocks of most networks."""
    return [
        block
        for part in module.modules()
        if isinstance(part, nn.ModuleList)
        for block in part
        if any(True for _ in block.parameters())
    ]


def gathered_alone(module: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the units that can be gathered at their call and released after it.

    Containers are never called, so their members replace them. Units without parameters, and units that share a
    parameter with a module outside, are gathered with the module. Inner units precede outer ones, as FSDP2 requires.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(part)
    found: dict[nn.Module, None] = {}
    waiting = list(reversed(units))
    while waiting:
        unit = waiting.pop()
        if type(unit).forward is nn.Module.forward:
            waiting += reversed(list(unit.children()))
            continue
        inside, own = set(unit.modules()), list(unit.parameters())
        if own and all(owners[parameter] <= inside for parameter in own):
            found[unit] = None
    places = {part: place for place, part in enumerate(module.modules())}
    return sorted(found, key=lambda unit: -places.get(unit, 0))


def check_units(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse parameters that FSDP2 cannot shard, before it shards any.

    The units are the parts of the module that are gathered alone.

    Raises:
        ConfigError: A parameter is a scalar, has sparse gradients or is not contiguous; or a unit has several dtypes.
    """
    claimed: set[nn.Parameter] = set()
    names = {p: name for name, p in module.named_parameters()}
    paths = {part: path for path, part in module.named_modules()}
    remedy = "zero=3 cannot shard that; use zero=2"
    for part, path in paths.items():
        if getattr(part, "sparse", False) is True:
            raise ConfigError(
                f"{path} has sparse gradients, and ranks sum dense ones: create it with sparse=False"
            )
    for unit in (*units, module):
        own = [p for p in unit.parameters() if p not in claimed]
        claimed.update(own)
        for p in own:
            if not p.dim():
                raise ConfigError(f"{names[p]} is a parameter without a dimension (a scalar): {remedy}")
            if not p.is_contiguous():
                raise ConfigError(
                    f"{names[p]} is not contiguous ({list(p.shape)} with strides {list(p.stride())}, as in "
                    f"channels_last): {remedy}, or call contiguous() on it"
                )
        kinds = sorted({str(p.dtype) for p in own})
        if len(kinds) > 1:
            raise ConfigError(
                f"{paths.get(unit) or type(unit).__name__} has parameters of {' and '.join(kinds)}, which are gathered "
                f"together: {remedy}, or convert them to one dtype"
            )
