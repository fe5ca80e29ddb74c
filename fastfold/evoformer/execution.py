"""How a residual update is carried out: in place or not, whole or in blocks.

The layers compute an update for any block of rows; an :class:`ExecutionPolicy` decides which blocks and where
the result goes. It is the only place that knows, so that layers read like the paper, and a parallel layout can
stand in for it between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Update = Callable[[Tensor, slice], Tensor]
"""Maps a block of the input, and the slice it was taken from, to a result for that block."""


@dataclass(frozen=True)
class ExecutionPolicy:
    """Execution of one module's residual updates.

    Attributes:
        block_elements: Elements of the input that a block holds at most (at least one row is taken);
            None computes everything at once.
        inplace: Write updates into their input when no gradient is recorded. The caller's tensors change:
            only for callers that own them.
    """

    block_elements: int | None = None
    inplace: bool = False

    def slices(self, x: Tensor, dim: int) -> Iterator[slice]:
        """Slices that cover axis ``dim`` of ``x`` in order."""
        size = x.shape[dim]
        step = size
        if self.block_elements is not None and size > 0:
            step = max(1, self.block_elements * size // max(1, x.numel()))
            blocks = -(-size // step)
            step = -(-size // blocks)
        for start in range(0, size, max(1, step)):
            yield slice(start, min(size, start + step))

    def update(self, x: Tensor, function: Update, *, dim: int, dropout: Tensor | None = None) -> Tensor:
        """``x + dropout * function(x)``, block by block along ``dim``.

        Args:
            x: ``[*]`` any tensor.
            function: Gives the update of one block; must depend on ``x`` through that block alone.
            dim: Axis to cut.
            dropout: Factors that broadcast against ``x`` (zero or ``1 / keep rate``), or None.

        Returns:
            The updated tensor: ``x`` itself when in place.
        """
        recording = torch.is_grad_enabled()
        results: list[Tensor] = []
        out = x if self.inplace and not recording else None
        for index in self.slices(x, dim):
            block = _take(x, dim, index)
            update = function(block, index)
            if dropout is not None:
                update = update * (dropout if dropout.shape[dim] == 1 else _take(dropout, dim, index))
            if recording:
                results.append(block + update)
                continue
            if out is None:
                out = torch.empty_like(x)
            torch.add(block, update, out=_take(out, dim, index))
        if recording:
            return results[0] if len(results) == 1 else torch.cat(results, dim)
        return x if out is None else out

    def map(self, x: Tensor, function: Update, *, dim: int) -> Tensor:
        """``function(x)`` block by block along ``dim``, joined along the same axis of the results."""
        results = [function(_take(x, dim, index), index) for index in self.slices(x, dim)]
        return results[0] if len(results) == 1 else torch.cat(results, dim)


def _take(x: Tensor, dim: int, index: slice) -> Tensor:
    return x.narrow(dim, index.start, index.stop - index.start)


class Executed(nn.Module):
    """Base of modules whose residual updates run under a policy."""

    policy: ExecutionPolicy = ExecutionPolicy()


def set_policy(model: nn.Module, policy: ExecutionPolicy) -> None:
    """Give every module of ``model`` that runs residual updates the same policy."""
    for module in model.modules():
        if isinstance(module, Executed):
            module.policy = policy
