"""How a residual branch is carried out: in place or not, whole or in blocks.

The layers compute a branch for any block of rows; an :class:`ExecutionPolicy` decides which blocks and where the
result goes. It is the only place that knows, so that layers read like the paper, and a parallel layout can stand in
for it between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Branch = Callable[[Tensor, slice, Tensor | None, Tensor | None], Tensor]
"""``(block, index, dropout, out)`` to ``block + dropout * update(block)``, written to ``out`` if that is given.

``index`` is the slice that the block was taken from, ``dropout`` broadcasts against the block."""


@dataclass(frozen=True)
class ExecutionPolicy:
    """Execution of one module's residual branches.

    Attributes:
        block_elements: Elements of the input that a block holds at most (at least one row is taken); None leaves
            everything to the operators, which work in blocks of their own.
        inplace: Write results into their input when no gradient is recorded. The caller's tensors change: only
            for callers that own them.
    """

    block_elements: int | None = None
    inplace: bool = False

    def slices(self, x: Tensor, dim: int) -> Iterator[slice]:
        """Slices that cover axis ``dim`` of ``x`` in order."""
        size = x.shape[dim]
        step = size
        if self.block_elements is not None:
            rows = max(1, self.block_elements * size // max(1, x.numel()))
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

    def map(
        self, x: Tensor, function: Callable[[Tensor, slice], Tensor], *, dim: int, start: int = 0
    ) -> Tensor:
        """``function(block, index)`` over blocks of ``x``, joined along the same axis of the results.

        ``start`` is the index that the first of ``x`` has in whatever ``x`` is a part of.
        """
        results = [
            function(_take(x, dim, index), slice(start + index.start, start + index.stop))
            for index in self.slices(x, dim)
        ]
        return results[0] if len(results) == 1 else torch.cat(results, dim)


def add_update(block: Tensor, update: Tensor, out: Tensor | None) -> Tensor:
    """The end of a branch without an operator of its own: ``block + update``, into ``out`` if that is given."""
    return block + update if out is None else torch.add(block, update, out=out)


def _take(x: Tensor, dim: int, index: slice) -> Tensor:
    return x.narrow(dim, index.start, index.stop - index.start)


class Executed(nn.Module):
    """Base of modules whose residual branches run under a policy."""

    policy: ExecutionPolicy = ExecutionPolicy()


def set_policy(model: nn.Module, policy: ExecutionPolicy) -> None:
    """Give every module of ``model`` that runs residual branches the same policy."""
    for module in model.modules():
        if isinstance(module, Executed):
            module.policy = policy
