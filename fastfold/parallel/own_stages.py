"""This rank's stages of a pipeline, and the parameters that it shares with other stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.module_structure import is_inside, joined

Split = Callable[[nn.Module, int], Sequence[nn.Module]]
"""Function that splits a model into a number of stages, which compose to it."""

T = TypeVar("T")


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of stages on several ranks, such as an embedding that is tied to the output layer.

    Its owner sums the gradients, steps it, and has its optimizer's states; the others take its values.
    """

    parameter: nn.Parameter
    group: Group  #: Ranks of the pipeline
    holders: tuple[int, ...]  #: Ranks with a copy; the first one is the owner

    @property
    def is_owner(self) -> bool:
        """True if this rank steps the parameter."""
        return self.group.rank == self.holders[0]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradients of all copies to the owner's; those of the others are None afterwards."""
        process_group, parameter = self.group.process_group, self.parameter
        if not self.is_owner:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            dist.send(own, group=process_group, group_dst=self.holders[0])
            parameter.grad = None
            return
        for holder in self.holders[1:]:
            received = torch.empty_like(parameter)
            dist.recv(received, group=process_group, group_src=holder)
            parameter.grad = received if parameter.grad is None else parameter.grad.add_(received)

    @torch.no_grad()
    def follow_owner(self) -> None:
        """Give all copies the owner's values."""
        process_group, values = self.group.process_group, self.parameter.detach().contiguous()
        if self.is_owner:
            for holder in self.holders[1:]:
                dist.send(values, group=process_group, group_dst=holder)
        else:
            dist.recv(values, group=process_group, group_src=self.holders[0])
            self.parameter.copy_(values)


@dataclass(frozen=True)
class OwnStages:
    """Stages of one rank; without a pipeline, the whole model."""

    module: nn.Module  #: With a pipeline, an ``nn.ModuleDict`` of the stages by their number
    renamed: dict[str, str]  #: Paths of the stages' modules, to those in the model; empty without a pipeline
    shared: list[SharedParameter]  #: Parameters that other ranks have too, in the same order on all ranks

    @property
    def called(self) -> list[tuple[str, nn.Module]]:
        """Modules that are called, with their paths in :attr:`module`."""
        return list(self.module.named_children()) if self.renamed else [("", self.module)]

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank's optimizer steps, by name."""
        followers = {id(one.parameter) for one in self.shared if not one.is_owner}
        named = self.module.named_parameters()
        return {name: p for name, p in named if p.requires_grad and id(p) not in followers}

    def moved(self, by_path: Mapping[str, T]) -> dict[str, T]:
        """Return values of layers by their paths in :attr:`module`."""
        if not self.renamed:
            return dict(by_path)
        return {
            joined(here, path[len(there) :].removeprefix(".")): value
            for path, value in by_path.items()
            for here, there in self.renamed.items()
            if is_inside(path, there)
        }


def take_own_stages(model: nn.Module, split: Split | None, mesh: ParallelMesh) -> OwnStages:
    """Split a model if the plan has a pipeline, and release the memory of other ranks' stages.

    Raises:
        ConfigError: The stages cannot be spread over the ranks, lack a part of the model, share a buffer, or have
            nothing to train.
    """
    group = mesh.group("pp")
    if group.size == 1 or split is None:
        return OwnStages(model, {}, [])
    paths = {id(module): path for path, module in model.named_modules() if path}
    stages = list(split(model, group.size))
    _check_stages(model, stages, group)
    module = nn.ModuleDict(
        {str(number): stage for number, stage in enumerate(stages) if number % group.size == group.rank}
    )
    shared = _find_shared(model, stages, paths, group)
    own = {id(p) for p in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.data = parameter.data.new_empty(0)
    return OwnStages(module, _find_paths(module, paths), shared)


def _check_stages(model: nn.Module, stages: Sequence[nn.Module], group: Group) -> None:
    if len(stages) % group.size or not stages:
        raise ConfigError(f"{len(stages)} stages cannot be spread over pp={group.size} ranks")
    stage_of: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, x in stage.state_dict(keep_vars=True).items():
            if isinstance(x, nn.Parameter) or not isinstance(x, Tensor):
                continue
            if stage_of.setdefault(id(x), number) != number:
                raise ConfigError(
                    f"{name} is a buffer of the pipeline's stages {stage_of[id(x)]} and {number}, which would change "
                    "it separately; give each stage a copy, or use tp or dp instead of pp"
                )
    held = {id(x) for stage in stages for x in (*stage.parameters(), *stage.buffers())}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if id(x) not in held:
            raise ConfigError(
                f"no stage of the pipeline has {name}: stages= must return every part of the model"
            )
    idle = next((i for i, x in enumerate(stages) if not any(p.requires_grad for p in x.parameters())), None)
    if idle is not None:
        raise ConfigError(
            f"stage {idle} of {len(stages)} of the pipeline has no parameter to train: put its layers into a stage "
            "with others, or use tp or dp instead of pp"
        )


def _find_paths(module: nn.Module, paths: Mapping[int, str]) -> dict[str, str]:
    """Return the paths of a stage's outermost modules that the model has, to those in the model."""
    renamed: dict[str, str] = {}
    for here, part in module.named_modules():
        if id(part) in paths and not any(is_inside(here, outer) for outer in renamed):
            renamed[here] = paths[id(part)]
    return renamed


def _find_shared(
    model: nn.Module, stages: Sequence[nn.Module], paths: Mapping[int, str], group: Group
) -> list[SharedParameter]:
    """Return this rank's parameters that other ranks copy; the owner has its first name in the model.

    Raises:
        ConfigError: A rank owns none of the parameters that train.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    holders = {name: _find_holders(name, p, stages, paths, group) for name, p in trained.items()}
    for rank in range(group.size):
        owners = {name: ranks[0] for name, ranks in holders.items() if rank in ranks}
        if owners and rank not in owners.values():
            name, owner = next(iter(owners.items()))
            raise ConfigError(
                f"rank {rank} of the pipeline has nothing of its own to train: rank {owner} trains {name}, which both "
                "have; put the layers of its stage into a stage with others, or use tp or dp instead of pp"
            )
    return [
        SharedParameter(trained[name], group, ranks)
        for name, ranks in holders.items()
        if len(ranks) > 1 and group.rank in ranks
    ]


def _find_holders(
    name: str, parameter: nn.Parameter, stages: Sequence[nn.Module], paths: Mapping[int, str], group: Group
) -> tuple[int, ...]:
    """Return the ranks whose stages have a parameter; the owner is the first."""
    numbers = [i for i, stage in enumerate(stages) if any(p is parameter for p in stage.parameters())]
    ranks = dict.fromkeys(number % group.size for number in numbers)
    if len(ranks) > 1:
        named = [i for i in numbers if _has_name(stages[i], name, paths)]
        ranks = dict.fromkeys(number % group.size for number in (*named, *numbers))
    return tuple(ranks)


def _has_name(stage: nn.Module, name: str, paths: Mapping[int, str]) -> bool:
    """Return True if a stage has the module whose parameter has a name in the model."""
    return any(is_inside(name, path) for path in _find_paths(stage, paths).values())
