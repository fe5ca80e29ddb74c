"""Linear layers whose weight is cut into blocks over the ranks of a tensor parallel group, and their products.

In SUMMA each rank holds one block of every matrix. Step k broadcasts column k of the left blocks along the rows and row
k of the right ones along the columns, and adds the product of the received blocks. Meanwhile the broadcasts of step
k + 1 run. A rank holds at most two received blocks of each matrix: the one in use and the next one.

Rank (x, y, z) of p³ ranks of a cube computes the product of slab x of the batch and block (y, z) of the weight. The
input is gathered along z, the weight along x. The output is summed along y, and each rank keeps a part of it. Between
layers every tensor is cut into p³ parts. Only these are saved for the backward pass, which gathers again.

Sources: van de Geijn and Watts 1997, and Xu, Li, Gong and You, "An efficient 2D method for training super-large deep
learning models", 2021; Agarwal et al. 1995, and Bian, Xu, Wang and You, "Maximizing parallelism in distributed training
for huge neural networks", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fastfold.parallel.checks.plain_layers import require_type
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import shards_in_turn, sums
from fastfold.parallel.comm.collectives import all_reduce, all_reduce_gradient, first_order
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.layout import CutLayer, Partition, ShardSpec, layouts, replicated

Role = Literal["first", "second"]


class ParallelLinear(CutLayer):
    """A linear layer on the ranks of a mesh's tensor parallel group; make one with :meth:`from_plain`.

    The mesh's mode determines the subclass: :class:`Linear1D`, :class:`LinearGrid` (2d and 2.5d) or :class:`Linear3D`.

    Attributes:
        weight: This rank's block.
        bias: This rank's part, or None.
        before: Layout of the input.
        after: Layout of the output.
        in_parts: Input features of each rank of ``before.features``.
        out_parts: Output features of each rank of ``after.features``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> from fastfold.parallel.tensor_parallel import ParallelLinear
        >>> plain, x = nn.Linear(8, 16), torch.randn(2, 8)
        >>> with fake_mesh(ParallelPlan(tp=4), rank=1) as mesh:  # simulates one of four ranks
        ...     own = ParallelLinear.from_plain(plain, mesh)
        ...     torch.allclose(own(x), plain(x)[:, 4:8], atol=1e-6)
        True
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
        outputs = self.out_parts.order
        self._cut("weight", linear.weight, self._weight_specs(), (outputs, self.in_parts.order))
        bias_specs = [ShardSpec(0, self.after.features, self.out_parts.sizes)]
        self._cut("bias", linear.bias, bias_specs, (outputs,))

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

    def to_plain(self) -> nn.Linear:
        """Return the plain layer, gathered on every rank (a collective)."""
        weight, bias = self._whole("weight"), self._whole("bias")
        assert weight is not None
        linear = nn.Linear(
            weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            out_order, in_order = self.out_parts.order, self.in_parts.order
            linear.weight[out_order[:, None], in_order] = weight
            if bias is not None:
                linear.bias[out_order] = bias
                linear.bias.requires_grad_(bias.requires_grad)
        linear.weight.requires_grad_(weight.requires_grad)
        return linear

    def _weight_specs(self) -> list[ShardSpec]:
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

    def _weight_specs(self) -> list[ShardSpec]:
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

    def _weight_specs(self) -> list[ShardSpec]:
        column = self.before.rows[-1]
        return [
            ShardSpec(0, self.after.features, self.out_parts.sizes),
            ShardSpec(1, column, self.in_parts.sizes),
        ]

    def _product(self, x: Tensor, weight: Tensor, row_sizes: Sequence[int] | None) -> Tensor:
        depth, column = self.before.rows
        weight = replicated(weight, (depth,))
        y: Tensor = SummaLinear.apply(x, weight, self.in_parts.sizes, self.before.features, column)
        return y


class Linear3D(ParallelLinear):
    """The product on a cube of p³ ranks: all-gather, all-gather, reduce-scatter.

    Communication per rank forward: (p - 1) / p³ of batch x in, in x out and batch x out each, O(1/P^⅔) of
    the activations; backward (p - 1) / p³ of twice the first two and once the last.
    """

    @property
    def _out_sizes(self) -> list[int]:
        return shard_sizes(self.out_parts.sizes[self.after.features.rank], self.before.rows[0].size)

    def _weight_specs(self) -> list[ShardSpec]:
        return [
            ShardSpec(1, self.before.features, self.in_parts.sizes),
            ShardSpec(0, self.after.features, self.out_parts.sizes),
            ShardSpec(0, self.before.rows[0], self._out_sizes),
        ]

    def _product(self, x: Tensor, weight: Tensor, row_sizes: Sequence[int] | None) -> Tensor:
        slab, line = self.before.rows
        rows = [x.shape[0]] * line.size if row_sizes is None else row_sizes
        lines = CubeLines(input=line, weight=slab, output=self.before.features)
        y: Tensor = CubeLinear.apply(x, weight, rows, self._out_sizes, lines)
        return y


_LINEARS: dict[str, type[ParallelLinear]] = {
    "1d": Linear1D,
    "2d": LinearGrid,
    "2.5d": LinearGrid,
    "3d": Linear3D,
}


class SummaLinear(Function):
    """``x @ weight.T``, ``[batch_i, ..., out_j]``, of matrices that are cut into blocks over a square grid.

    ``x`` is ``[batch_i, ..., in_j]``: this rank's row of the batch, its column's part of the features. The weight is
    ``[out_j, in_i]``: its column's part of the output features, its row's part of the input features, which have parts
    of lengths ``sizes``. ``row`` are the ranks of its row of the grid, one for each column, ``column`` those of its
    column.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sizes: Sequence[int], row: Group, column: Group
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.row, ctx.column = sizes, row, column
        # Half precision would round after every step.
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.new_zeros((*x.shape[:-1], weight.shape[0]), dtype=wide)
        # Blocks of x along this rank's row, and of the weight along its column.
        lefts, rights = shards_in_turn(x, -1, sizes, row), shards_in_turn(weight, -1, sizes, column)
        for left, right in zip(lefts, rights, strict=True):
            y += left @ right.T
        return y.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        row, column = ctx.row, ctx.column
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            # Features k of the input belong to column k.
            rights = shards_in_turn(weight, -1, ctx.sizes, column)
            (x_gradient,) = sums((gradient @ right for right in rights), range(row.size), row)
        if ctx.needs_input_grad[1]:
            flat = gradient.reshape(-1, gradient.shape[-1])
            lefts = shards_in_turn(x, -1, ctx.sizes, row)
            terms = (flat.T @ left.reshape(flat.shape[0], -1) for left in lefts)
            (weight_gradient,) = sums(terms, range(column.size), column)
        return x_gradient, weight_gradient, None, None, None


class CubeLines(NamedTuple):
    """The lines of the cube that contain a rank.

    Input and weight are gathered along theirs. Along that of the output, which splits the input's features, products
    are summed.
    """

    input: Group
    weight: Group
    output: Group


class CubeLinear(Function):
    """``x @ weight.T``, ``[rows[r], ..., sum(cuts)]`` with r this rank's number in ``lines.output``, on a cube.

    ``x`` is ``[rows[r], ..., in]`` with r the number in ``lines.input``: the rank's part of the slab's batch, whose
    lengths ``rows`` are the same before and after. The weight is ``[cuts[r], in]`` with r the number in
    ``lines.weight``: its part of the block's outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rows: Sequence[int], cuts: Sequence[int], lines: CubeLines
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.cuts, ctx.lines = rows, cuts, lines
        inputs = async_ops.start_gather(x, 0, lines.input, rows)
        weights = async_ops.start_gather(weight, 0, lines.weight, cuts)
        return async_ops.start_reduce_scatter(inputs.wait() @ weights.wait().T, 0, lines.output, rows).wait()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        lines = ctx.lines
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        gradients = async_ops.start_gather(gradient, 0, lines.output, ctx.rows)
        weights = async_ops.start_gather(weight, 0, lines.weight, ctx.cuts) if wants_x else None
        inputs = async_ops.start_gather(x, 0, lines.input, ctx.rows) if wants_weight else None
        whole = gradients.wait()
        x_terms = weight_terms = None
        if weights is not None:
            x_terms = async_ops.start_reduce_scatter(whole @ weights.wait(), 0, lines.input, ctx.rows)
        if inputs is not None:
            left = inputs.wait()
            product = whole.reshape(-1, whole.shape[-1]).T @ left.reshape(-1, left.shape[-1])
            weight_terms = async_ops.start_reduce_scatter(product, 0, lines.weight, ctx.cuts)
        of_both = (None if terms is None else terms.wait() for terms in (x_terms, weight_terms))
        return *of_both, None, None, None
