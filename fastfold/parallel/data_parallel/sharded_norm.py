"""Norms of whole parameters from the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor in memory of its own (a collective); other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    # Padded shards leave a part of more memory, which safetensors refuses and torch.save would write.
    return full.clone() if full.untyped_storage().nbytes() > full.nbytes else full


class ShardNorms:
    """Squared norms of tensors that are cut over groups of ranks; replicated parts count once.

    Groups are those over which each parameter is cut, by its name. The ranks of ``pipeline`` hold different parameters
    of one model, for :meth:`total`.
    """

    def __init__(self, groups: Mapping[str, Sequence[Group]], pipeline: Group | None = None) -> None:
        self._pipeline = pipeline
        self._cut = {name: [group for group in cut if group.size > 1] for name, cut in groups.items()}
        by_name = {group.name: group for cut in self._cut.values() for group in cut}
        # Every rank visits the groups in the same order.
        self._groups = [by_name[name] for name in sorted(by_name)]

    def squares(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the squared norm of each whole tensor, ``[n]`` float64, the same on all ranks that share it.

        One sum over each group, for all tensors together: a collective. Every rank gives its parts by the same names,
        of parameters, in the same order.
        """
        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        parts = [local(tensor) for tensor in tensors.values()]
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        norms = torch._foreach_norm([part if part.dtype == wide else part.to(wide) for part in parts])
        # A float32 square overflows above 3e38.
        squares = torch.stack(list(norms)).double().square()
        for group in self._groups:
            cut = [any(one is group for one in self._cut.get(name, ())) for name in tensors]
            if any(cut):
                mask = torch.tensor(cut, device=squares.device)
                total = async_ops.start_all_reduce(torch.where(mask, squares, 0), group).wait()
                squares = torch.where(mask, total, squares)
        return squares

    def total(self, tensors: Mapping[str, Tensor | None]) -> Tensor:
        """Return the squared norm of all tensors over all pipeline stages (a collective).

        Tensors are those of :meth:`squares`; None is left out. All ranks get the same float64 scalar.
        """
        square = self.squares({name: x for name, x in tensors.items() if x is not None}).sum()
        return square if self._pipeline is None else async_ops.start_all_reduce(square, self._pipeline).wait()
