"""How the network is carried out: in place or not, whole or in blocks, and what is kept.

A layer computes its residual branch for any :class:`Block` of rows; an :class:`ExecutionPolicy` decides which blocks
there are and where the results go. Nothing else knows, so that layers read like the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastfold.kernels.ops.triangle_multiplication.contraction import ContractionPlan
from fastfold.memory.offload import HostBuffers, OffloadedRows


class Block(NamedTuple):
    """What one call of a residual branch works on.

    Attributes:
        x: Part of the tensor that is updated, or all of it.
        rows: The slice of the axis that ``x`` was taken from.
        dropout: Factors that broadcast against ``x``, or None.
        out: Where the result goes, or None for a new tensor.
    """

    x: Tensor
    rows: slice
    dropout: Tensor | None
    out: Tensor | None

    def add(self, update: Tensor) -> Tensor:
        """``x + dropout * update``, all of the shape of ``x``: the end of a branch whose operator does not add it."""
        if self.dropout is not None:
            update = update * self.dropout
        return self.x + update if self.out is None else torch.add(self.x, update, out=self.out)

    def take(self, dim: int, rows: slice) -> Block:
        """A part of this block along ``dim``."""
        dropout = self.dropout
        if dropout is not None and dropout.shape[dim] > 1:
            dropout = _take(dropout, dim, rows)
        return Block(
            _take(self.x, dim, rows), rows, dropout, None if self.out is None else _take(self.out, dim, rows)
        )

    def transposed(self) -> Block:
        """The same block ``[*, A, B, c]`` seen as ``[*, B, A, c]``, without a copy."""
        return Block(self.x.transpose(-3, -2), self.rows, columns(self.dropout), columns(self.out))


Branch = Callable[[Block], Tensor]
"""From a block to ``block.x + block.dropout * update(block.x)``, written to ``block.out`` if that is given."""


@dataclass(frozen=True)
class ExecutionPolicy:
    """Execution of one module. All but the first field count only when no gradient is recorded.

    Attributes:
        block_elements: Maximum number of elements of a block of the input (but at least one row); None leaves
            everything to the operators, which work in blocks of their own.
        inplace: Write results into their input. The caller's tensors change: only for callers that own them.
        contraction: How much a triangle multiplication holds at a time, and where its product is held.
        templates: Numbers of the templates that a monomer network is shown, for callers that know them; None to look
            at their mask, for which a GPU is waited for.
        hold_templates: Keep every embedded template of a monomer network between the two times that it is needed,
            rather than embed it twice.
        offload: Host memory for the pair while templates are embedded; None leaves it on the device.
        offload_kept: With ``offload``: share of the pair's rows that stay on the device, from 0 to 1.
        reshard_blocks: Where ranks share a protein: blocks of channels in which a shard is cut along its other axis.
        lazy_logits: Give the logits of pairs as :class:`LazyRows`, computed when they are asked for.
        heads: Names of the heads to run; None for all. What no head needs is freed early.
    """

    block_elements: int | None = None
    inplace: bool = False
    contraction: ContractionPlan = field(default_factory=ContractionPlan)
    templates: tuple[int, ...] | None = None
    hold_templates: bool = True
    offload: HostBuffers | None = None
    offload_kept: float = 0.0
    reshard_blocks: int = 4
    lazy_logits: bool = False
    heads: tuple[str, ...] | None = None

    def slices(self, x: Tensor, dim: int, channels: int = 1) -> Iterator[slice]:
        """Slices that cover axis ``dim`` of any tensor ``x`` in order; each of its elements counts as ``channels``."""
        size = x.shape[dim]
        step = size
        if self.block_elements is not None:
            rows = max(1, self.block_elements * size // max(1, x.numel() * channels))
            step = -(-size // -(-size // rows)) if size else 1
        # An empty axis (a rank without a row of a shallow alignment) is one empty block.
        for start in range(0, max(1, size), max(1, step)):
            yield slice(start, min(size, start + step))

    def apply_residual(
        self, x: Tensor, branch: Branch, *, dim: int | None, dropout: Tensor | None = None
    ) -> Tensor:
        """``x + dropout * update(x)``, block by block.

        Args:
            x: Any tensor.
            branch: Gives the sum for a block (:data:`Branch`), which must depend on ``x`` through that block alone.
            dim: Axis along which ``x`` may be cut; None if the branch needs all of it.
            dropout: Factors that broadcast against ``x`` (zero or ``1 / keep rate``), or None.

        Returns:
            The updated tensor: ``x`` itself when in place.
        """
        out = None if torch.is_grad_enabled() else x if self.inplace else torch.empty_like(x)
        whole = Block(x, slice(None), dropout, out)
        if dim is None:
            return branch(whole)
        results = [branch(whole.take(dim, rows)) for rows in self.slices(x, dim)]
        if out is not None:
            return out
        return results[0] if len(results) == 1 else torch.cat(results, dim)

    def pair_rows(self, pair: Tensor) -> PairRows:
        """The pair ``[*, N, N, c]``, to be read and updated by rows: on the host if the policy offloads it."""
        alone = pair.is_contiguous() and pair.untyped_storage().nbytes() == pair.nbytes
        if self.offload is None or not self.inplace or not alone or torch.is_grad_enabled():
            return PairRows(pair)
        return OffloadedPairRows(pair, self.offload, kept=self.offload_kept)

    def map(
        self,
        x: Tensor,
        function: Callable[[Tensor, slice], Tensor],
        *,
        dim: int,
        start: int = 0,
        channels: int = 1,
        consume: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """``function(block, index)`` over blocks of ``x``, joined along the same axis of the results.

        Args:
            x: Any tensor.
            function: Gives a block of the result, as long as the block of ``x`` along ``dim``.
            dim: The axis, counted from the end.
            start: Index of the first of ``x`` in the tensor that ``x`` is a part of.
            channels: How many elements the function makes of one of ``x``, for the size of the blocks.
            consume: ``x`` is not needed any more: its memory may hold the result.
            out: Where the result goes, if no gradients are recorded.
        """
        blocks = list(self.slices(x, dim, channels))
        results = []
        for index in blocks:
            found = function(_take(x, dim, index), slice(start + index.start, start + index.stop))
            if (len(blocks) == 1 and out is None) or torch.is_grad_enabled():
                results.append(found)
                continue
            if out is None:
                shape = list(found.shape)
                shape[dim] = x.shape[dim]
                same = consume and self.inplace and list(x.shape) == shape and x.dtype == found.dtype
                out = x if same else found.new_empty(shape)
            _take(out, dim, index).copy_(found)
        if out is not None:
            return out
        return results[0] if len(results) == 1 else torch.cat(results, dim)


class PairRows:
    """A pair tensor ``[*, N, N, c]`` that is read and updated by rows.

    Args:
        pair: The tensor.

    Attributes:
        pair: A tensor of its shape, to be cut into blocks; its contents come from :meth:`read` alone.
    """

    def __init__(self, pair: Tensor) -> None:
        self.pair = pair

    def read(self, rows: slice) -> Tensor:
        """Rows ``[*, rows, N, c]`` on the device."""
        return self.pair[..., rows, :, :]

    def add(self, block: Block, update: Tensor) -> Tensor:
        """The end of a branch over :attr:`pair`, as :meth:`Block.add`."""
        return block.add(update)

    def restore(self) -> Tensor:
        """The tensor as it is now, on the device."""
        return self.pair


class OffloadedPairRows(PairRows):
    """A pair tensor whose contents are on the host until :meth:`restore`; its memory on the device is free.

    Args:
        pair: Contiguous and alone in its memory; not to be used before :meth:`restore`.
        host: Where it goes.
        kept: Share of its rows that stay on the device, in memory of their own.
    """

    def __init__(self, pair: Tensor, host: HostBuffers, *, kept: float = 0.0) -> None:
        self._offloaded = OffloadedRows(pair, host, kept=kept)
        super().__init__(self._offloaded.placeholder)

    def read(self, rows: slice) -> Tensor:
        """Rows ``[*, rows, N, c]``, copied from the host."""
        return self._offloaded.rows(rows)

    def add(self, block: Block, update: Tensor) -> Tensor:
        """Add ``update [*, rows, N, c]`` to the block's rows on the host; what is on the device has no contents."""
        self._offloaded.write(block.rows, self._offloaded.rows(block.rows).add_(update))
        return block.x

    def restore(self) -> Tensor:
        """The tensor as it is now, back on the device."""
        return self._offloaded.restore()


class LazyRows:
    """A tensor of residue pairs ``[*, N, N, c]`` whose rows are computed whenever they are asked for.

    Args:
        function: Gives rows ``[*, rows, N, c]``.
        shape: Shape of the whole tensor.
        policy: Decides how many rows are a block.
    """

    def __init__(
        self, function: Callable[[slice], Tensor], shape: tuple[int, ...], policy: ExecutionPolicy
    ) -> None:
        self.rows, self.shape, self.policy = function, torch.Size(shape), policy

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows in order, a block at a time, each with its index."""
        size, limit = self.shape[-3], self.policy.block_elements
        step = size if limit is None else max(1, limit * size // max(1, self.shape.numel()))
        for start in range(0, size, max(1, step)):
            index = slice(start, min(size, start + step))
            yield index, self.rows(index)

    def whole(self) -> Tensor:
        """The tensor ``[*, N, N, c]``."""
        return self.rows(slice(0, self.shape[-3]))


def rows_of(x: Tensor | LazyRows, index: slice) -> Tensor:
    """Rows ``[*, rows, N, c]`` of a tensor of residue pairs."""
    return x.rows(index) if isinstance(x, LazyRows) else x[..., index, :, :]


def columns(x: Tensor | None) -> Tensor | None:
    """A tensor of rows seen as columns, ``[*, A, B, c]`` as ``[*, B, A, c]``, without a copy; None stays None."""
    return None if x is None else x.transpose(-3, -2)


def _take(x: Tensor, dim: int, index: slice) -> Tensor:
    if index.stop - index.start == x.shape[dim]:
        return x
    return x.narrow(dim, index.start, index.stop - index.start)


class PolicyModule(nn.Module):
    """Base of modules that run under a policy.

    Attributes:
        operator: What plans call modules of this kind.
        policy: The policy.
    """

    operator: str = ""
    policy: ExecutionPolicy = ExecutionPolicy()


def set_policy(
    model: nn.Module, policy: ExecutionPolicy, blocks: Mapping[str, int | None] | None = None
) -> None:
    """Give every module of ``model`` that runs under a policy the same one.

    Args:
        model: The network, or a part of it.
        policy: What every module gets.
        blocks: ``block_elements`` by :attr:`PolicyModule.operator`, for those that have others.
    """
    for module in model.modules():
        if isinstance(module, PolicyModule):
            own = (blocks or {}).get(module.operator, policy.block_elements)
            module.policy = policy if own == policy.block_elements else replace(policy, block_elements=own)
