"""Comparison of a module on parts of a sequence with the same module on the whole.

An operator that combines positions and is not spread over the ranks gives other results on parts. Examples are
positions counted by ``torch.arange(x.shape[1])``, convolutions, recurrent layers, means, and attention of a class that
was not named. So the module runs in parts and as a whole before its first call, at every new length, when it changes
between training and evaluation, and after a call whose operators were not compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter as preserved_versions
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from fastfold.errors import ConfigError, first_line
from fastfold.parallel.checks.operators import (
    OperatorLog,
    OutputLog,
    RepeatableCall,
    kind_name,
)
from fastfold.parallel.checks.rounding import is_close, without_small_weights
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group
from fastfold.utils.module_structure import detached_copy, tensors_in

MAX_POSITIONS = 16384  #: Number of positions of all ranks in a comparison; longer sequences are shortened

_WAIT = timedelta(seconds=60)  #: Maximum wait for the other ranks to run a new operator too
_LETTERS = 300  #: Length of a problem that a rank tells the others

_REMEDY = (
    "count positions from first of SequenceParallel (or pass them as an input that shard() has cut), name every class "
    "that calls attention, and move other operators along the sequence (convolutions, recurrent layers, means) out "
    "of the module; or pass compare_first=False to SequenceParallel"
)

_Key = tuple[tuple[int, ...], bool, bool]


class SequenceComparison:
    """Comparisons of one module before and after its calls.

    ``laid_out`` returns a context for the lengths of all parts of a sequence, or None for the whole on each rank.
    ``sizes`` returns the lengths of the parts at the next call.
    """

    _count = 0

    def __init__(
        self,
        group: Group,
        laid_out: Callable[[Sequence[int] | None], AbstractContextManager[None]],
        sizes: Callable[[], Sequence[int]],
    ) -> None:
        self._group, self._laid_out, self._sizes = group, laid_out, sizes
        self._dims = WeakIdKeyDictionary()
        self._known: dict[_Key, set[Hashable]] = {}
        self._open: list[OperatorLog] = []
        self._is_comparing, self._calls = False, 0
        self._random = random.getstate()
        SequenceComparison._count += 1
        self._number = SequenceComparison._count

    def note(self, part: Tensor, dim: int) -> None:
        """Record the sequence dimension of an input."""
        self._dims[part] = dim % part.dim()

    def attach(self, module: nn.Module) -> None:
        """Compare the module at its calls."""
        if self._group.is_alone:
            return
        begin, end = torch.compiler.disable(self._begin), torch.compiler.disable(self._end)

        def before(called: nn.Module, args: Any, kwargs: Any) -> None:
            begin(called, args, kwargs, torch.compiler.is_compiling())

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(end, with_kwargs=True, always_call=True)

    def paused(self) -> AbstractContextManager[object]:
        """Return a context whose operators are left out: attention over the ranks or over the whole."""
        return self._open[-1].paused() if self._open else nullcontext()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any, is_compiled: bool) -> None:
        if self._is_comparing or self._open:
            return
        self._calls += 1
        self._random = random.getstate()
        self._key = tuple(self._sizes()), module.training, torch.is_grad_enabled()
        if self._key not in self._known:
            self._known[self._key] = self.compare(module, args, kwargs, self._key[0])
        if not is_compiled and not any(
            isinstance(x, torch._dynamo.OptimizedModule) for x in module.modules()
        ):
            self._open.append(OperatorLog())
            self._open[-1].__enter__()

    def _end(self, module: nn.Module, args: Any, kwargs: Any, result: object) -> None:
        if self._is_comparing or not self._open:
            return
        log = self._open.pop()
        log.__exit__(None, None, None)
        sizes, known = self._key[0], self._known[self._key]
        if result is None or not _missing(log.kinds, known, sizes):  # a call that raises has no result
            return
        self._wait_for_others(module, _names(log.kinds - known))
        known |= self.compare(module, args, kwargs, sizes)
        if missing := _missing(log.kinds, known, sizes):
            raise ConfigError(
                f"{type(module).__name__} ran {_names(missing)} and does not when the call is repeated, so its results "
                "on parts of a sequence cannot be compared: make its operators depend on its inputs alone, or pass "
                "compare_first=False to SequenceParallel"
            )

    def _wait_for_others(self, module: nn.Module, names: str) -> None:
        """Wait until all ranks have run an operator that was not compared, because the comparison is a collective."""
        assert self._group.process_group is not None
        store = dist.distributed_c10d._get_default_store()
        ranks = dist.get_process_group_ranks(self._group.process_group)
        place = f"fastfold/sequence/{ranks[0]}/{self._number}/{self._calls}"
        store.set(f"{place}/{self._group.rank}", names)
        try:
            store.wait([f"{place}/{rank}" for rank in range(self._group.size)], _WAIT)
        except RuntimeError as error:  # DistStoreError of most stores
            raise ConfigError(
                f"{type(module).__name__} ran {names} on rank {self._group.rank} of {self._group.name} for the first "
                "time and not on all others, so it cannot be compared with the whole sequence: make its operators "
                "the same on every rank, or pass compare_first=False to SequenceParallel"
            ) from error

    def compare(self, module: nn.Module, args: Any, kwargs: Any, sizes: Sequence[int]) -> set[Hashable]:
        """Run a sequence in parts and as a whole (a collective); return the kinds of operators on parts.

        Random numbers are constants and dropout keeps everything. Attributes, buffers and random generators are
        unchanged afterwards. ``sizes`` are the lengths of the parts of the sequence.

        Raises:
            ConfigError: The results differ, on any rank.
        """
        if self._group.is_alone:
            return set()
        longest = max(1, MAX_POSITIONS // self._group.size)
        used = [min(size, longest) for size in sizes] if sum(sizes) > MAX_POSITIONS else list(sizes)
        self._is_comparing, self._has_graph = True, torch.is_grad_enabled()
        try:
            with torch.compiler.set_stance("force_eager"), torch.no_grad():
                parts, whole = self._inputs(args, kwargs, sizes, used)
                log, run = RepeatableCall(), self._run
                of_part = run(module, parts, used, log)
                problem = self._difference(of_part, run(module, whole, None, RepeatableCall()), used)
                if problem := self._first(problem):
                    culprit = self._first(self._culprit(module, parts, whole, used))
                    raise ConfigError(
                        f"{type(module).__name__} gives another result on parts of a sequence than on the whole "
                        f"({problem}{'; ' if culprit else ''}{culprit}): {_REMEDY}"
                    )
        finally:
            self._is_comparing = False
        return log.kinds

    def _first(self, problem: str | None) -> str:
        """Return the first rank's problem on every rank (a collective), or an empty text."""
        text = (problem or "").encode()[:_LETTERS]
        own = torch.zeros(_LETTERS, dtype=torch.uint8)
        own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        device = "cpu" if self._group.backend == "gloo" else "cuda"
        of_all = async_ops.gather_numbers(own.to(device), self._group).cpu()
        texts = (bytes(x.tolist()).rstrip(b"\0").decode(errors="ignore") for x in of_all)
        return next(filter(None, texts), "")

    def _culprit(self, module: nn.Module, parts: Any, whole: Any, sizes: Sequence[int]) -> str | None:
        """Return the name of the first operator that gives another result on this rank's part, or None."""
        # Layers choose other operators for tensors that are not contiguous, as those of a part may be.
        parts = tree_map_only(Tensor, _contiguous, parts)
        logs = OutputLog(module), OutputLog(module)
        for log, inputs, lengths in zip(logs, (parts, whole), (sizes, None), strict=True):
            with log.named():
                self._run(module, inputs, lengths, log)
        rank = self._group.rank
        return logs[0].first_apart(logs[1], (sum(sizes[:rank]), sizes[rank], sum(sizes)))

    def _run(self, module: nn.Module, inputs: Any, sizes: Sequence[int] | None, log: OperatorLog) -> Any:
        self._open.append(log)
        try:
            # Some operators are others where a graph is recorded; tensors that it saves are not needed.
            with (
                unchanged(module),
                torch.set_grad_enabled(self._has_graph),
                saved_tensors_hooks(lambda _: None, _unsaved),
            ):
                random.setstate(self._random)
                args, kwargs = _own_copies(inputs)
                with self._laid_out(sizes), log:
                    return module(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{type(module).__name__} has no memory for a comparison on the whole sequence ({first_line(error)}): "
                "call it with a shorter sequence first, then pass compare_first=False to SequenceParallel"
            ) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            length = "the whole of" if sizes is None else "parts of"
            raise ConfigError(
                f"{type(module).__name__} on {length} a sequence raises {type(error).__name__}: "
                f"{first_line(error)}; {_REMEDY}"
            ) from error
        finally:
            self._open.pop()

    def _inputs(self, args: Any, kwargs: Any, sizes: Sequence[int], short: Sequence[int]) -> tuple[Any, Any]:
        """Return arguments of a shortened sequence, for this rank's part and for the whole."""
        leaves, spec = tree_flatten((args, kwargs))
        parts, whole = list(leaves), list(leaves)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            known = self._dims.get(leaf)
            x = self._narrow_keys(leaf.detach(), known, sizes, short)
            parts[i] = whole[i] = x
            dim = self._own_dim(x, known, sizes)
            if dim is not None:
                parts[i] = part = x.narrow(dim, 0, short[self._group.rank])
                whole[i] = async_ops.start_gather(part.contiguous(), dim, self._group, short).wait()
            for of_run in (parts, whole):
                of_run[i] = of_run[i].detach().requires_grad_(leaf.requires_grad)
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
        """Keep the keys of the shortened sequence in a mask for all keys."""
        if x.dim() < 2 or x.shape[-1] != sum(sizes) or known == x.dim() - 1:
            return x
        starts = accumulate(sizes, initial=0)
        kept = [start + i for start, count in zip(starts, short, strict=False) for i in range(count)]
        return x[..., torch.tensor(kept, device=x.device)]

    def _difference(self, of_part: Any, expected: Any, short: Sequence[int]) -> str | None:
        ours, theirs = list(tensors_in(of_part)), list(tensors_in(expected))
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


def _own_copies(inputs: Any) -> Any:
    """Copy arguments with their strides; those that require a gradient are no leaves, and may change in place."""
    leaves, spec = tree_flatten(inputs)
    return tree_unflatten([_own_copy(x) if isinstance(x, Tensor) else detached_copy(x) for x in leaves], spec)


def _own_copy(x: Tensor) -> Tensor:
    if 0 in x.stride():  # an expanded tensor, which cannot be written to
        return x.detach().requires_grad_(x.requires_grad)
    copied = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copied.copy_(x.detach().requires_grad_(x.requires_grad))


def _contiguous(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_(x.requires_grad)


def _unsaved(_: None) -> Tensor:
    raise RuntimeError("a run for comparison has no backward pass")


def _missing(kinds: set[Hashable], known: set[Hashable], sizes: Sequence[int]) -> set[Hashable]:
    """Return the kinds that were not compared; by their names alone after a comparison of a shortened sequence."""
    if kinds <= known or sum(sizes) <= MAX_POSITIONS:
        return kinds - known
    names = {kind_name(kind) for kind in known}
    return {kind for kind in kinds if kind_name(kind) not in names}


def _names(kinds: set[Hashable]) -> str:
    return ", ".join(sorted({kind_name(kind) for kind in kinds})[:3])


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore a module after a run inside the context: attributes, buffers, weights and random generators.

    Weights near zero are random inside, so that none hides earlier layers.
    """
    attributes = {part: dict(part.__dict__) for part in module.modules()}
    buffers = {part: dict(part._buffers) for part in module.modules()}
    values = {x: x.detach().clone() for x in module.buffers()}
    saved = tuple(x for x in (*module.parameters(), *values) if not x.is_inference())
    generator, is_cuda = random.getstate(), any(x.is_cuda for x in saved)
    try:
        with (
            torch.random.fork_rng() if is_cuda else torch.random.fork_rng([]),
            # Backward passes check that the tensors that they saved have not changed since.
            preserved_versions(saved) if saved else nullcontext(),
            without_small_weights(module),
        ):
            try:
                yield
            finally:
                with torch.no_grad():
                    for x, value in values.items():
                        x.copy_(value)
    finally:
        random.setstate(generator)
        for part, kept in attributes.items():
            for name in part.__dict__.keys() - kept:
                del part.__dict__[name]
            part.__dict__.update(kept)
            part._buffers.clear()
            part._buffers.update(buffers[part])
