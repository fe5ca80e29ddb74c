"""Options of parameter groups (learning rate, betas, …) by the plain model's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.full_state import FullStateDict

ParamGroup = dict[str, Any]  #: Options of a group; ``params`` has the names of its parameters


def named_groups(
    groups: Sequence[ParamGroup], names: Mapping[nn.Parameter, str], full_state: FullStateDict
) -> list[ParamGroup]:
    """Return an optimizer's groups with the plain model's names in ``params`` (a collective).

    Groups of all pipeline stages are returned on every rank. Groups with the same number and the same options on
    several stages are one group. Tensors of one number become Python numbers.

    Args:
        groups: Parameter groups of this rank's optimizer.
        names: Name of each parameter on this rank.
        full_state: Converter of this rank's names to those of the plain model.
    """
    stages = full_state.mesh.group("pp")
    own = [{key: _plain(x) for key, x in group.items() if key != "params"} for group in groups]
    of_all: list[list[ParamGroup]] = [own] * stages.size
    if stages.size > 1:
        dist.all_gather_object(of_all, own, group=stages.process_group)
    kept: list[tuple[int, ParamGroup]] = []
    # Position in the joint list of each stage's groups.
    places = [[_place(kept, number, options) for number, options in enumerate(of_one)] for of_one in of_all]
    numbers = {
        names[parameter]: torch.tensor(float(places[stages.rank][number]))
        for number, group in enumerate(groups)
        for parameter in group["params"]
    }
    members: list[list[str]] = [[] for _ in kept]
    for name, number in full_state.plain_scalars(numbers).items():
        members[int(number)].append(name)
    return [{"params": params, **options} for params, (_, options) in zip(members, kept, strict=True)]


def _place(kept: list[tuple[int, ParamGroup]], number: int, options: ParamGroup) -> int:
    """Return the place of a stage's group in the joint list, to which a new group is added."""
    if (number, options) not in kept:
        kept.append((number, options))
    return kept.index((number, options))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


@torch.no_grad()
def restore_groups(
    groups: Sequence[ParamGroup],
    names: Mapping[nn.Parameter, str],
    full_state: FullStateDict,
    saved: Iterable[Mapping[str, Any]],
) -> None:
    """Set the options of an optimizer's groups to those of :func:`named_groups`, of any plan.

    A group without a parameter in ``saved`` keeps its options. Other arguments are those of :func:`named_groups`.

    Raises:
        ConfigError: Parameters of a group had different options when the state was written.
    """
    saved = list(saved)
    numbers = {name: torch.tensor(float(i)) for i, group in enumerate(saved) for name in group["params"]}
    by_name = full_state.shard_scalars(numbers, list(names.values()))
    for group in groups:
        members = [names[p] for p in group["params"] if names[p] in by_name]
        if not members:
            continue
        options = [_options(saved[int(by_name[name])]) for name in members]
        for name, other in zip(members, options, strict=True):
            if other != options[0]:
                raise ConfigError(
                    f"the optimizer has {members[0]} and {name} in one parameter group, and its state has them in two "
                    "with different options; create the groups that the state was written with"
                )
        for key, value in options[0].items():
            present = group.get(key)
            if isinstance(present, Tensor):
                present.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(present, tuple) else value


def _options(group: Mapping[str, Any]) -> ParamGroup:
    return {key: x for key, x in group.items() if key != "params"}
