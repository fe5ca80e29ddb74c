"""How the network is carried out: in place or not, whole or in blocks, and what is kept.

The layers compute a branch for any block of rows; an :class:`ExecutionPolicy` decides which blocks and where the
result goes. It is the only place that knows, so that layers read like the paper, and a parallel layout can stand in
for it between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fastfold.kernels.ops.triangle_multiplication.contraction import ContractionPlan
from fastfold.memory.offload import HostBuffers, OffloadedRows

Branch = Callable[[Tensor, slice, Tensor | None, Tensor | None], Tensor]
"""``(block, index, dropout, out)`` to ``block + dropout * update(block)``, written to ``out`` if that is given.

``index`` is the slice that the block was taken from, ``dropout`` broadcasts against the block."""


@dataclass(frozen=True)
class ExecutionPolicy:
    """Execution of one module. All but the first field count only when no gradient is recorded.

    Attributes:
        block_elements: Elements of the input that a block holds at most (at least one row is taken); None leaves
            everything to the operators, which work in blocks of their own.
        inplace: Write results into their input. The caller's tensors change: only for callers that own them.
        contraction: How much a triangle multiplication holds at a time, and where its product waits.
        hold_templates: Keep every embedded template of a monomer network between the two times that it is needed,
            rather than embed it twice.
        parking: Where the pair waits while templates are embedded; None for the device.
        lazy_logits: Give the logits of pairs as :class:`LazyRows`, computed when they are asked for.
        heads: Names of the heads to run; None for all. What no head needs is freed early.
    """

    block_elements: int | None = None
    inplace: bool = False
    contraction: ContractionPlan = field(default_factory=ContractionPlan)
    hold_templates: bool = True
    parking: HostBuffers | None = None
    lazy_logits: bool = False
    heads: tuple[str, ...] | None = None

    def slices(self, x: Tensor, dim: int, channels: int = 1) -> Iterator[slice]:
        """Slices that cover axis ``dim`` of ``x`` in order; each element of ``x`` counts as ``channels``."""
        size = x.shape[dim]
        step = size
        if self.block_elements is not None:
            rows = max(1, self.block_elements * size // max(1, x.numel() * channels))
            step = -(-size // -(-size // rows)) if size else 1
        # An empty axis (a rank without a row of a shallow alignment) is one empty block.
        for start in range(0, max(1, size), max(1, step)):
            yield slice(start, min(size, start + step))

    def residual(
        self, x: Tensor, branch: Branch, *, dim: int | None, dropout: Tensor | None = None
    ) -> Tensor:
        """``x`` with a residual branch added.

        Args:
            x: Any tensor.
            branch: See :data:`Branch`; a block's result must depend on ``x`` through that block alone.
            dim: Axis along which ``x`` may be cut; None if the branch needs all of it.
            dropout: Factors that broadcast against ``x`` (zero or ``1 / keep rate``), or None.

        Returns:
            The updated tensor: ``x`` itself when in place.
        """
        recording = torch.is_grad_enabled()
        out = None if recording else x if self.inplace else torch.empty_like(x)
        if dim is None:
            return branch(x, slice(None), dropout, out)
        results = []
        for index in self.slices(x, dim):
            factors = dropout
            if dropout is not None and dropout.shape[dim] > 1:
                factors = _take(dropout, dim, index)
            part = None if out is None else _take(out, dim, index)
            results.append(branch(_take(x, dim, index), index, factors, part))
        if out is not None:
            return out
        return results[0] if len(results) == 1 else torch.cat(results, dim)

    def offloaded(self, pair: Tensor) -> OffloadedRows | None:
        """The pair ``[*, N, N, c]`` on the host until it is asked back; None where it stays."""
        alone = pair.is_contiguous() and pair.untyped_storage().nbytes() == pair.nbytes
        if self.parking is None or not self.inplace or not alone or torch.is_grad_enabled():
            return None
        return OffloadedRows(pair, self.parking)

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
            start: The index that the first of ``x`` has in whatever ``x`` is a part of.
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
        self.rows, self.shape, self._policy = function, torch.Size(shape), policy

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows in order, a block at a time, each with its index."""
        size, limit = self.shape[-3], self._policy.block_elements
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


def add_update(block: Tensor, update: Tensor, out: Tensor | None) -> Tensor:
    """The end of a branch without an operator of its own: ``block + update``, into ``out`` if that is given."""
    return block + update if out is None else torch.add(block, update, out=out)


def _take(x: Tensor, dim: int, index: slice) -> Tensor:
    return x.narrow(dim, index.start, index.stop - index.start)


class Executed(nn.Module):
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
        policy: The policy.
        blocks: ``block_elements`` by :attr:`Executed.operator`, for those that shall have others.
    """
    for module in model.modules():
        if isinstance(module, Executed):
            own = (blocks or {}).get(module.operator, policy.block_elements)
            module.policy = policy if own == policy.block_elements else replace(policy, block_elements=own)
