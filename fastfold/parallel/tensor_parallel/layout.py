"""Layouts of tensors on the ranks of a tensor parallel group: activations, and parameters cut into blocks.

Activations are ``[batch, ..., features]``. Layers come in pairs, such as the two linears of an MLP or those before and
after an attention: the first maps from the *outer* layout to the *inner* one, the second back.

========  =====================  =====================  =====================  =====================
mode      batch, outer           features, outer        batch, inner           features, inner
========  =====================  =====================  =====================  =====================
1d        whole                  whole                  whole                  tp
2d        tp_column              tp_row                 tp_column              tp_row
2.5d      tp_depth, tp_column    tp_row                 tp_depth, tp_column    tp_row
3d        tp_x, tp_z             tp_y                   tp_x, tp_y             tp_z
========  =====================  =====================  =====================  =====================

In 1d every rank computes the same loss from the whole output, so gradients are those of that one loss. In the other
modes each rank holds its own part of the output, and gradients are those of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.comm import collectives
from fastfold.parallel.comm.groups import Group, nested_shard, shard_sizes, shard_slices
from fastfold.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class Layout:
    """Groups over which activations are split.

    Example:
        >>> import torch
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> from fastfold.parallel.tensor_parallel import Partition, layouts
        >>> x = torch.arange(16).view(4, 4)
        >>> with fake_mesh(ParallelPlan(tp=4, tp_mode="2d"), rank=1) as mesh:  # simulates one of 2 x 2 ranks
        ...     outer, _ = layouts(mesh)
        ...     outer.take(x, Partition.even(4, outer.features.size))
        tensor([[2, 3],
                [6, 7]])
    """

    rows: tuple[Group, ...]  #: Groups over which the batch, dimension 0, is split, the outermost first
    features: Group  #: Group over which the last dimension is split

    def take(self, x: Tensor, features: Partition | None = None) -> Tensor:
        """Return this rank's block of a whole tensor ``[batch, ..., features]``, cut evenly; not differentiable.

        Without ``features`` the last dimension stays whole (labels, token ids).
        """
        x = x[nested_shard(x.shape[0], self.rows)]
        if features is not None:
            x = x[..., features.part(self.features.rank).to(x.device)]
        return x

    def _batch_sizes(self, batch: int) -> list[list[int]]:
        """Return for each group of ``rows`` the shards of this rank's part over the previous groups."""
        sizes = []
        for group in self.rows:
            sizes.append(shard_sizes(batch, group.size))
            batch = sizes[-1][group.rank]
        return sizes

    def row_sizes(self, batch: int) -> list[int] | None:
        """Return the layers' ``row_sizes`` for a whole batch that :meth:`take` cuts; None if it is not split."""
        return self._batch_sizes(batch)[-1] if self.rows else None

    def join(self, x: Tensor, batch: int, features: Partition | None = None) -> Tensor:
        """Join all ranks' blocks on every rank, as the differentiable inverse of :meth:`take`.

        The batch is the length of the whole one; ``features`` is None where they are whole.
        """
        if features is not None:
            x = collectives.gather(x, -1, self.features, features.sizes)
            x = x[..., features.order.argsort().to(x.device)]
        for group, sizes in reversed(list(zip(self.rows, self._batch_sizes(batch), strict=True))):
            x = collectives.gather(x, 0, group, sizes)
        return x


def layouts(mesh: ParallelMesh) -> tuple[Layout, Layout]:
    """Return the outer and the inner layout of a mesh's tensor parallel mode (the table above).

    Example:
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> from fastfold.parallel.tensor_parallel import layouts
        >>> with fake_mesh(ParallelPlan(tp=4)) as mesh:  # simulates one of four ranks
        ...     outer, inner = layouts(mesh)
        ...     print(outer.features.size, inner.features)
        1 Group(tp, rank 0 of 4)
    """
    mode = mesh.plan.tp_mode
    if mode == "1d":
        return Layout((), Group(None, "alone", mesh.reporter)), Layout((), mesh.group("tp"))
    if mode == "3d":
        x, y, z = (mesh.group(name) for name in ("tp_x", "tp_y", "tp_z"))
        return Layout((x, z), y), Layout((x, y), z)
    grid = Layout((mesh.group("tp_depth"), mesh.group("tp_column")), mesh.group("tp_row"))
    return grid, grid


@dataclass(frozen=True)
class Partition:
    """Partition of features over ranks.

    Example:
        >>> from fastfold.parallel.tensor_parallel import Partition
        >>> Partition.even(10, ranks=4).sizes
        [3, 3, 2, 2]
        >>> Partition.heads(heads=3, width=2, ranks=2).parts  # two heads, and one
        ((0, 1, 2, 3), (4, 5))
    """

    parts: tuple[tuple[int, ...], ...]  #: For each rank the indices of its features, in its order

    @classmethod
    def even(cls, length: int, ranks: int) -> Partition:
        """Return consecutive shards, the first ones one longer."""
        return cls(tuple(tuple(range(part.start, part.stop)) for part in shard_slices(length, ranks)))

    @classmethod
    def heads(cls, heads: int, width: int, ranks: int, repeats: int = 1) -> Partition:
        """Return whole attention heads for each rank.

        With ``repeats`` = 3, features are queries, keys and values one after another.

        Raises:
            ConfigError: There are fewer heads than ranks.
        """
        if heads < ranks:
            raise ConfigError(
                f"{heads} attention heads cannot be split over {ranks} ranks; use at most {heads} ranks"
            )
        own = cls.even(heads, ranks).parts
        return cls(
            tuple(
                tuple(
                    (k * heads + head) * width + i
                    for k in range(repeats)
                    for head in part
                    for i in range(width)
                )
                for part in own
            )
        )

    @property
    def sizes(self) -> list[int]:
        """Number of features of each rank."""
        return [len(part) for part in self.parts]

    @property
    def order(self) -> Tensor:
        """All features in the order of the ranks."""
        return torch.tensor([i for part in self.parts for i in part], dtype=torch.int64)

    def part(self, rank: int) -> Tensor:
        """Return the indices of one rank's features."""
        return torch.tensor(self.parts[rank], dtype=torch.int64)


@dataclass(frozen=True)
class ShardSpec:
    """Sharding of one dimension of a parameter: dimension ``dim`` into shards of ``sizes`` over ``group``."""

    dim: int
    group: Group
    sizes: Sequence[int]


def block(whole: Tensor, specs: Sequence[ShardSpec]) -> Tensor:
    """Return this rank's block of a parameter that is sharded by successive specs (a copy)."""
    for spec in specs:
        whole = whole.narrow(spec.dim, sum(spec.sizes[: spec.group.rank]), spec.sizes[spec.group.rank])
    return whole.detach().clone()


def whole(own: Tensor, specs: Sequence[ShardSpec]) -> Tensor:
    """Return the parameter from all ranks' blocks, on every rank; the inverse of :func:`block`."""
    own = own.detach()
    for spec in reversed(specs):
        own = collectives.gather(own, spec.dim, spec.group, spec.sizes)
    return own


class CutLayer(nn.Module):
    """Layer whose parameters are this rank's blocks of a plain layer's."""

    weight: Any  #: This rank's block, or None
    bias: Any  #: This rank's block, or None

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[str, list[ShardSpec]] = {}

    def _cut(
        self, name: str, plain: Tensor | None, specs: list[ShardSpec], order: tuple[Tensor, ...] = ()
    ) -> None:
        """Register this rank's block of a plain parameter, whose dimensions are put in another order before."""
        self.register_parameter(name, None)
        if plain is not None:
            values = plain.detach()
            for dim, indices in enumerate(order):
                values = values.index_select(dim, indices.to(values.device))
            self._specs[name] = specs
            self.register_parameter(name, nn.Parameter(block(values, specs), plain.requires_grad))

    def _whole(self, name: str) -> nn.Parameter | None:
        own = getattr(self, name)
        return None if own is None else nn.Parameter(whole(own, self._specs[name]), own.requires_grad)

    def shard_specs(self) -> dict[str, list[ShardSpec]]:
        """Return the cut of each parameter."""
        return self._specs


def parameter_shard_specs(module: nn.Module) -> dict[str, tuple[ShardSpec, ...]]:
    """Return the sharding of a module's parameters, by name; missing ones are whole on every rank.

    Layers of this package inside it have their own ``shard_specs``.

    Example:
        >>> from torch import nn
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> from fastfold.parallel.tensor_parallel import ParallelLinear, parameter_shard_specs
        >>> with fake_mesh(ParallelPlan(tp=4)) as mesh:  # simulates one of four ranks
        ...     model = nn.Sequential(ParallelLinear.from_plain(nn.Linear(8, 10), mesh), nn.GELU())
        >>> for name, specs in parameter_shard_specs(model).items():
        ...     print(name, [(spec.dim, spec.group.name, spec.sizes) for spec in specs])
        0.weight [(0, 'tp', [3, 3, 2, 2])]
        0.bias [(0, 'tp', [3, 3, 2, 2])]
    """
    specs_by_name: dict[str, tuple[ShardSpec, ...]] = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        specs = getattr(layer, "shard_specs", None)
        if callable(specs):
            prefix = f"{path}." if path else ""
            specs_by_name |= {f"{prefix}{name}": tuple(of_one) for name, of_one in specs().items()}
    return specs_by_name


def replicated(parameter: Tensor, groups: Sequence[Group]) -> Tensor:
    """Return a replicated parameter for different data on these groups: its gradient is summed."""
    for group in groups:
        parameter = collectives.all_reduce_gradient(parameter, group)
    return parameter
