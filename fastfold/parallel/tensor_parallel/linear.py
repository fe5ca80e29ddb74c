"""Linear layers whose weight is cut into blocks over the ranks of a tensor parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fastfold.parallel.comm.collectives import all_reduce, all_reduce_gradient
from fastfold.parallel.comm.groups import shard_sizes
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.cube import CubeLines, cube_linear
from fastfold.parallel.tensor_parallel.layout import Partition, ShardSpec, block, layouts, replicated, whole
from fastfold.parallel.tensor_parallel.plain_layers import require_type
from fastfold.parallel.tensor_parallel.summa import summa_linear

Role = Literal["first", "second"]


class ParallelLinear(nn.Module):
    """A linear layer on the ranks of a mesh's tensor parallel group; make one with :meth:`from_plain`.

    The mesh's mode determines the subclass: :class:`Linear1D`, :class:`LinearGrid` (2d and 2.5d) or :class:`Linear3D`.

    Attributes:
        weight: This rank's block.
        bias: This rank's part, or None.
        before: Layout of the input.
        after: Layout of the output.
        in_parts: Input features of each rank of ``before.features``.
        out_parts: Output features of each rank of ``after.features``.
    """

    def __init__(
        self,
        linear: nn.Linear,
        mesh: ParallelMesh,
        role: Role,
        in_parts: Partition | None,
        out_parts: Partition | None,
    ) -> None:
        super().__init__()
        outer, inner = layouts(mesh)
        self.role = role
        self.before, self.after = (outer, inner) if role == "first" else (inner, outer)
        self.in_parts = in_parts or Partition.even(linear.in_features, self.before.features.size)
        self.out_parts = out_parts or Partition.even(linear.out_features, self.after.features.size)
        self._weight_specs = self._specs()
        self._bias_specs = [ShardSpec(0, self.after.features, self.out_parts.sizes)]
        ordered = linear.weight.detach()[self.out_parts.order][:, self.in_parts.order]
        self.weight = nn.Parameter(block(ordered, self._weight_specs), linear.weight.requires_grad)
        self.bias = None
        if linear.bias is not None:
            values = linear.bias.detach()[self.out_parts.order]
            self.bias = nn.Parameter(block(values, self._bias_specs), linear.bias.requires_grad)

    @staticmethod
    def from_plain(
        linear: nn.Linear,
        mesh: ParallelMesh,
        role: Role = "first",
        *,
        in_parts: Partition | None = None,
        out_parts: Partition | None = None,
    ) -> ParallelLinear:
        """Return this rank's part of a plain layer, which is the same on every rank.

        Args:
            linear: The plain layer.
            mesh: The ranks; the plan's ``tp_mode`` determines the cut.
            role: ``first`` of a pair maps from the outer layout to the inner one, ``second`` back.
            in_parts: Input features of each rank; even shards if None.
            out_parts: Output features of each rank; even shards if None.

        Raises:
            ConfigError: The layer is of a subclass of ``nn.Linear``.
        """
        require_type(linear, nn.Linear, "ParallelLinear")
        return _LINEARS[mesh.plan.tp_mode](linear, mesh, role, in_parts, out_parts)

    def shard_specs(self) -> dict[str, list[ShardSpec]]:
        """Return the cut of each parameter."""
        return {"weight": self._weight_specs} | ({} if self.bias is None else {"bias": self._bias_specs})

    def to_plain(self) -> nn.Linear:
        """Return the plain layer, gathered on every rank (a collective)."""
        weight = whole(self.weight, self._weight_specs)
        linear = nn.Linear(
            weight.shape[1], weight.shape[0], self.bias is not None, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            out_order, in_order = self.out_parts.order, self.in_parts.order
            linear.weight[out_order[:, None], in_order] = weight
            if self.bias is not None:
                linear.bias[out_order] = whole(self.bias, self._bias_specs)
                linear.bias.requires_grad_(self.bias.requires_grad)
        linear.weight.requires_grad_(self.weight.requires_grad)
        return linear

    def _specs(self) -> list[ShardSpec]:
        """Return the cut of the weight ``[out, in]`` into blocks."""
        raise NotImplementedError

    def _product(self, x: Tensor, weight: Tensor, row_sizes: Sequence[int] | None) -> Tensor:
        """Compute ``x @ weight.T`` of the whole matrices, in blocks."""
        raise NotImplementedError

    def forward(self, x: Tensor, row_sizes: Sequence[int] | None = None) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[batch, ..., in]``, this rank's block in the layout ``before``.
            row_sizes: Only for 3d: the batch of each rank of ``before.rows[-1]``; None if all are as long as this one.
                The output's batch is cut in the same way over ``after.rows[-1]``.

        Returns:
            ``[batch, ..., out]``, this rank's block in the layout ``after``.
        """
        weight: Tensor = self.weight
        if torch.is_autocast_enabled(x.device.type):
            # Cast before the exchanges, so that they send the narrow type. The backward pass runs outside of autocast.
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        y = self._product(x, weight, row_sizes)
        return y if self.bias is None else y + replicated(self.bias, self.after.rows).to(y.dtype)


class Linear1D(ParallelLinear):
    """Megatron's layer: the first of a pair is cut by outputs (columns), the second by inputs (rows).

    Communication: the first sums the input's gradient over the ranks, the second its output, 2 (P - 1) / P of the
    activations each: O(1).
    """

    def _specs(self) -> list[ShardSpec]:
        if self.role == "first":
            return [ShardSpec(0, self.after.features, self.out_parts.sizes)]
        return [ShardSpec(1, self.before.features, self.in_parts.sizes)]

    def _product(self, x: Tensor, weight: Tensor, row_sizes: Sequence[int] | None) -> Tensor:
        if self.role == "first":
            return all_reduce_gradient(x, self.after.features) @ weight.T
        return all_reduce(x @ weight.T, self.before.features)


class LinearGrid(ParallelLinear):
    """SUMMA on one square grid, or in 2.5d on ``tp_depth`` grids with different parts of the batch.

    The grids hold the same blocks of the weight, whose gradient is summed over the depth. Communication per rank
    with q² d = P ranks: (q - 1) / q of (batch x in) / (q d) + (in x out) / q forward and twice that
    backward, in addition to 2 (d - 1) / d of the weight's block: of the activations O(1/√P) in 2d, O(1/√(dP)) in 2.5d.
    """

    def _specs(self) -> list[ShardSpec]:
        column = self.before.rows[-1]
        return [
            ShardSpec(0, self.after.features, self.out_parts.sizes),
            ShardSpec(1, column, self.in_parts.sizes),
        ]

    def _product(self, x: Tensor, weight: Tensor, row_sizes: Sequence[int] | None) -> Tensor:
        depth, column = self.before.rows
        weight = replicated(weight, (depth,))
        return summa_linear(x, weight, self.in_parts.sizes, self.before.features, column)


class Linear3D(ParallelLinear):
    """The product on a cube of p³ ranks: all-gather, all-gather, reduce-scatter.

    Communication per rank forward: (p - 1) / p³ of batch x in, in x out and batch x out each, O(1/P^⅔) of
    the activations; backward (p - 1) / p³ of twice the first two and once the last.
    """

    @property
    def _out_sizes(self) -> list[int]:
        return shard_sizes(self.out_parts.sizes[self.after.features.rank], self.before.rows[0].size)

    def _specs(self) -> list[ShardSpec]:
        return [
            ShardSpec(1, self.before.features, self.in_parts.sizes),
            ShardSpec(0, self.after.features, self.out_parts.sizes),
            ShardSpec(0, self.before.rows[0], self._out_sizes),
        ]

    def _product(self, x: Tensor, weight: Tensor, row_sizes: Sequence[int] | None) -> Tensor:
        slab, line = self.before.rows
        rows = [x.shape[0]] * line.size if row_sizes is None else row_sizes
        lines = CubeLines(input=line, weight=slab, output=self.before.features)
        return cube_linear(x, weight, rows, self._out_sizes, lines)


_LINEARS: dict[str, type[ParallelLinear]] = {
    "1d": Linear1D,
    "2d": LinearGrid,
    "2.5d": LinearGrid,
    "3d": Linear3D,
}
