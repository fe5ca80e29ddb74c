"""What a step touches and when, recorded while it runs and recognised when it comes again.

A cycle is one training step (any number of forward passes, with and without gradients, and a backward pass) or one
evaluation pass. It is known by its passes, and each pass by what changes it: the module that was called, training or
not, with gradients or not, the shapes of its inputs (rounded up, in buckets) and its numbers (such as recycles).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastfold.memory.planner.schedule import Access, Chunk, Span

# What may stay or leave: its kind, the number of the block's call, and its number there.
SpanKey = tuple[str, int, int]


@dataclass(frozen=True)
class PassKey:
    """What makes one pass different from another.

    Args:
        module: Name of the outermost module called; empty for the model.
        training: Whether it was in training mode.
        grad: Whether gradients were recorded.
        shapes: Of all input tensors, each dimension rounded up to a power of two.
        options: Numbers, strings and truth values among the inputs.
        opaque: Whether there are functions among the inputs, which may bring anything: no two such passes are alike.
    """

    module: str
    training: bool
    grad: bool
    shapes: tuple[tuple[int, ...], ...]
    options: tuple[object, ...]
    opaque: bool = False

    @property
    def evaluation(self) -> bool:
        """Stands alone: neither a training step nor a part of one."""
        return not (self.training or self.grad)


def pass_key(
    name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[PassKey, int]:
    """The key of a call, and the number of elements of its inputs.

    Args:
        name: The module's name in the model.
        module: What is called.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    leaves = tree_leaves((args, sorted(kwargs.items())))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shapes = tuple(tuple(1 << (n - 1).bit_length() if n else 0 for n in t.shape) for t in tensors)
    options = tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | float | str))
    opaque = any(callable(leaf) for leaf in leaves)
    key = PassKey(name, module.training, torch.is_grad_enabled(), shapes, options, opaque)
    return key, sum(t.numel() for t in tensors)


@dataclass(frozen=True)
class Trace:
    """One recorded cycle.

    Args:
        keys: Its passes.
        elements: Input elements of each.
        starts: The access with which each begins.
        accesses: Chunks and other memory, in order.
        before: Bytes of other things when each access began.
        spans: What could have left the device for some time, saved tensors of the forward pass.
        kept: Those that did not; they are counted among other memory.
    """

    keys: tuple[PassKey, ...]
    elements: tuple[int, ...]
    starts: tuple[int, ...]
    accesses: tuple[Access, ...]
    before: tuple[int, ...]
    spans: Mapping[SpanKey, Span] = field(default_factory=dict)
    kept: frozenset[SpanKey] = frozenset()


class Recorder:
    """Writes down one cycle."""

    def __init__(self) -> None:
        self.keys: list[PassKey] = []
        self.elements: list[int] = []
        self._starts: list[int] = []
        self._chunks: list[frozenset[Chunk]] = []
        self._others: list[int] = []
        self._before: list[int] = []
        self._saved: dict[SpanKey, tuple[int, int]] = {}
        self._used: dict[SpanKey, int] = {}
        self.kept: set[SpanKey] = set()
        self.calls = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def begin(self, key: PassKey, elements: int) -> None:
        """A pass begins."""
        self.keys.append(key)
        self.elements.append(elements)
        self._starts.append(len(self._chunks))

    def access(self, chunks: frozenset[Chunk], before: int) -> None:
        """From now on these chunks are in use, and no others; ``before`` bytes of other things are there already."""
        self._chunks.append(chunks)
        self._before.append(before)
        self._others.append(0)

    def measured(self, other: int) -> None:
        """Most bytes of other things since the last access."""
        if self._others:
            self._others[-1] = max(self._others[-1], other)

    def saved(self, key: SpanKey, size: int) -> None:
        """Something has come to be that may leave; its size in bytes may be corrected later."""
        first = self._saved[key][1] if key in self._saved else max(0, len(self) - 1)
        self._saved[key] = (size, first)

    def used(self, key: SpanKey) -> None:
        """It is needed now."""
        if key in self._saved:
            self._used.setdefault(key, max(0, len(self) - 1))

    def trace(self) -> Trace:
        """The cycle so far."""
        spans = {
            key: Span(size, first, self._used[key])
            for key, (size, first) in self._saved.items()
            if self._used.get(key, first) > first
        }
        return Trace(
            tuple(self.keys),
            tuple(self.elements),
            tuple(self._starts),
            tuple(map(Access, self._chunks, self._others)),
            tuple(self._before),
            spans,
            frozenset(self.kept),
        )


# Cycles remembered; inputs of ever new shapes must not fill the memory.
REMEMBERED = 256


class TraceBook:
    """The latest cycles seen, to tell from a cycle's first passes what will follow."""

    def __init__(self) -> None:
        self._traces: dict[tuple[PassKey, ...], Trace] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def expect(self, keys: Sequence[PassKey], elements: Sequence[int]) -> Trace | None:
        """The latest cycle that began like this and was no smaller; None where there is none.

        A pass with more elements than any recorded in its bucket may need more memory, so it is recorded anew.
        """
        count = len(keys)
        if any(key.opaque for key in keys):
            return None
        for trace in reversed(self._traces.values()):
            if trace.keys[:count] == tuple(keys) and all(map(int.__ge__, trace.elements, elements)):
                return trace
        return None

    def keep(self, trace: Trace) -> Trace:
        """Remembers a cycle as the latest; memory counts as the most that was ever seen at an access.

        Returns:
            What is remembered: the earlier object where nothing has changed.
        """
        if any(key.opaque for key in trace.keys):
            return trace
        if len(self._traces) >= REMEMBERED:
            del self._traces[next(iter(self._traces))]
        known = self._traces.pop(trace.keys, None)
        if known is not None and known.kept == trace.kept and _chunks(known) == _chunks(trace):
            accesses = tuple(
                Access(a.chunks, max(a.other, b.other))
                for a, b in zip(known.accesses, trace.accesses, strict=True)
            )
            elements = tuple(map(max, known.elements, trace.elements))
            before = tuple(map(max, known.before, trace.before))
            spans = {key: _larger(span, known.spans.get(key)) for key, span in trace.spans.items()}
            trace = replace(trace, elements=elements, accesses=accesses, before=before, spans=spans)
            if trace == known:
                trace = known
        self._traces[trace.keys] = trace
        return trace


def _chunks(trace: Trace) -> list[frozenset[Chunk]]:
    return [access.chunks for access in trace.accesses]


def _larger(span: Span, other: Span | None) -> Span:
    return span if other is None or other.size <= span.size else replace(span, size=other.size)
