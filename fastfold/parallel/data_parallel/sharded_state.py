"""State of the plain model, cut over the ranks; no rank ever holds the whole.

Tensor parallel layers and pieces of ZeRO are made plain a few at a time. A rank keeps its slice of each tensor as a
DTensor. ``torch.distributed.checkpoint`` writes and reads these for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from fastfold.parallel.data_parallel.full_state import FullStateDict

_LEAST = 4096
"""Minimum number of elements of a tensor that is cut."""


class ShardedStateDict:
    """Slices of the plain model's tensors over the ranks that hold parts of the same layers."""

    def __init__(self, full_state: FullStateDict) -> None:
        self._mesh, self._full_state = full_state.mesh, full_state

    def cut(self, names: Sequence[str], parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return this rank's slices of the plain tensors of its pipeline stage (a collective).

        Args:
            names: This rank's names of all tensors in ``parts``.
            parts: The tensors in the shapes of this rank's parameters, some at a time, in the same order on all ranks
                of a stage. They are cut and released before the next ones are requested.

        Returns:
            DTensors by the plain model's names; small tensors are whole. Nothing is cut where every rank has all
            parameters and states anyway.
        """
        missing = {name: group for group in self._full_state.cut_together(names) for name in group}
        waiting: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        for part in parts:
            waiting |= part
            for name in part:
                group = missing[name]
                if all(each in waiting for each in group):
                    found |= self._slices({each: waiting.pop(each) for each in group})
        return found

    def _slices(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Slice tensors that are made plain together."""
        plain = self._full_state.plain(own, everywhere=False)
        return {name: self._slice(x) for name, x in plain.items()}

    def _slice(self, x: Tensor) -> Tensor:
        """Slice a tensor that all ranks of the stage have along its longest dimension."""
        plan = self._mesh.plan
        if x.numel() < _LEAST or (plan.tp == 1 and not plan.zero):
            return x
        ranks = self._mesh.stage()
        if ranks is None:
            return x
        longest = max(range(x.dim()), key=lambda dim: x.shape[dim])
        return distribute_tensor(x, ranks, [Shard(longest)], src_data_rank=None)
