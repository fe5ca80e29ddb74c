"""Comparison of a module on parts of a sequence with the same module on the whole, at its first call.

An operator that combines positions and is not spread over the ranks gives other results on parts. Examples are
positions counted by ``torch.arange(x.shape[1])``, convolutions, recurrent layers, means, and attention of a class that
was not named. The first positions of every rank's part make a short sequence, which the module runs in parts and as a
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from fastfold.errors import ConfigError, first_line
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.comparison import detached_copy, is_close, without_small_weights
from fastfold.utils.module_structure import tensors_in

LONGEST = 16  #: Number of positions of each rank in a comparison

_REMEDY = (
    "count positions from first of SequenceParallel (or pass them as an input that shard() has cut), name every class "
    "that calls attention, and move other operators along the sequence (convolutions, recurrent layers, means) out "
    "of the module; or pass compare_first=False to SequenceParallel"
)


class FirstCall:
    """One comparison of a module, to be made before its first call.

    ``laid_out`` returns a context for the lengths of all parts of a short sequence, or None for the whole on each rank.
    """

    def __init__(
        self, group: Group, laid_out: Callable[[Sequence[int] | None], AbstractContextManager[None]]
    ) -> None:
        self._group, self._laid_out = group, laid_out
        self._dims = WeakIdKeyDictionary()

    def note(self, part: Tensor, dim: int) -> None:
        """Record the sequence dimension of an input."""
        self._dims[part] = dim % part.dim()

    @torch.no_grad()
    def compare(self, module: nn.Module, args: Any, kwargs: Any, sizes: Sequence[int]) -> None:
        """Run a short sequence in parts and as a whole (a collective).

        The module is unchanged afterwards; ``sizes`` are the lengths of the parts of the sequence.

        Raises:
            ConfigError: The results differ, on any rank.
        """
        if self._group.is_alone:
            return
        short = [min(size, LONGEST) for size in sizes]
        training = {part: part.training for part in module.modules()}
        device = next((x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
        try:
            for part in training:
                part.training = False
            parts, whole = self._inputs(args, kwargs, sizes, short)
            with without_small_weights(module):
                found = self._run(module, parts, short)
                expected = self._run(module, whole, None)
        finally:
            for part, is_training in training.items():
                part.training = is_training
        problem = self._difference(found, expected, short)
        own = torch.tensor(problem is not None, device=device)
        if bool(async_ops.gather_numbers(own, self._group).any()):
            raise ConfigError(
                f"{type(module).__name__} gives another result on parts of a sequence than on the whole ("
                f"{problem or 'on another rank'}): {_REMEDY}"
            )

    def _run(self, module: nn.Module, inputs: Any, sizes: Sequence[int] | None) -> Any:
        args, kwargs = inputs
        try:
            with self._laid_out(sizes):
                return module(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            where = "the whole of" if sizes is None else "parts of"
            raise ConfigError(
                f"{type(module).__name__} on {where} a short sequence raises {type(error).__name__}: "
                f"{first_line(error)}; {_REMEDY}"
            ) from error

    def _inputs(self, args: Any, kwargs: Any, sizes: Sequence[int], short: Sequence[int]) -> tuple[Any, Any]:
        """Return arguments of a short sequence, for this rank's part and for the whole."""
        leaves, spec = tree_flatten((args, kwargs))
        dims = [self._dims.get(x) if isinstance(x, Tensor) else None for x in leaves]
        parts = tree_leaves(detached_copy((args, kwargs)))
        whole = list(parts)
        for i, (x, known) in enumerate(zip(parts, dims, strict=True)):
            if not isinstance(x, Tensor):
                continue
            parts[i] = whole[i] = x = self._narrow_keys(x, known, sizes, short)
            dim = self._own_dim(x, known, sizes)
            if dim is not None:
                parts[i] = part = x.narrow(dim, 0, short[self._group.rank])
                whole[i] = async_ops.start_gather(part.contiguous(), dim, self._group, short).wait()
        return tree_unflatten(parts, spec), tree_unflatten(whole, spec)

    def _own_dim(self, x: Tensor, known: int | None, sizes: Sequence[int]) -> int | None:
        """Find the dimension of this rank's positions, the same on all ranks, or None."""
        if known is not None:
            return known
        fits = torch.tensor([n == sizes[self._group.rank] for n in x.shape], device=x.device)
        if not x.dim():
            return None
        everywhere = async_ops.gather_numbers(fits, self._group).all(0)
        places = [int(i) for i in everywhere.nonzero()]
        if len(places) > 1:
            raise ConfigError(
                f"sequence parallelism: expected one dimension of {sizes[self._group.rank]} positions in an input, "
                f"found {len(places)} in {list(x.shape)}: cut it by shard(x, dim) of SequenceParallel"
            )
        return places[0] if places else None

    def _narrow_keys(
        self, x: Tensor, known: int | None, sizes: Sequence[int], short: Sequence[int]
    ) -> Tensor:
        """Keep the keys of the short sequence in a mask for all keys."""
        if x.dim() < 2 or x.shape[-1] != sum(sizes) or known == x.dim() - 1:
            return x
        starts = accumulate(sizes, initial=0)
        kept = [start + i for start, count in zip(starts, short, strict=False) for i in range(count)]
        return x[..., torch.tensor(kept, device=x.device)]

    def _difference(self, found: Any, expected: Any, short: Sequence[int]) -> str | None:
        ours, theirs = list(tensors_in(found)), list(tensors_in(expected))
        problem = None
        if len(ours) != len(theirs):
            return f"expected {len(theirs)} results, found {len(ours)}"
        for number, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            if not x.is_floating_point():
                continue
            if not y.dim():
                # A loss of this rank's positions counts as their sum, or as their mean times their number.
                of_all = async_ops.gather_numbers(x, self._group)
                shares = of_all.new_tensor(short) / sum(short)
                if any(is_close(y, z) for z in (x, of_all.sum(), (of_all * shares).sum())):
                    continue
            cut = [dim for dim in range(y.dim()) if x.dim() == y.dim() and y.shape[dim] == sum(short)]
            for dim in cut:
                if x.shape[dim] == short[self._group.rank]:
                    y = y.narrow(dim, sum(short[: self._group.rank]), short[self._group.rank])
                    break
            if x.shape != y.shape:
                problem = problem or f"result {number}: expected shape {list(y.shape)}, found {list(x.shape)}"
            elif not is_close(y, x):
                apart, largest = float((x - y).abs().max()), float(y.abs().max())
                problem = problem or f"result {number} is off by {apart:.1e} of {largest:.1e}"
        return problem
