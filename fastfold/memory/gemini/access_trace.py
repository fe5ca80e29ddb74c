"""Record the chunks that a step uses, and recognise a cycle that repeats.

A cycle is one training step (forward passes with and without gradients, and a backward pass) or one evaluation pass. It
is identified by its passes. A pass is identified by the module, training mode, gradient mode, the shapes of its
inputs (rounded up to buckets) and its numbers. A pass with other numbers, such as recycles, follows the same trace:
recycling repeats or leaves out accesses without gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastfold.memory.planner.schedule import Access, Chunk, Span

# Kind of an offloadable tensor, number of the block's call, and number of the tensor there.
SpanKey = tuple[str, int, int]


@dataclass(frozen=True)
class PassKey:
    """Identity of a pass."""

    module: str  #: Name of the outermost module called; empty for the model
    training: bool  #: True in training mode
    grad: bool  #: True if gradients are recorded
    #: Shapes of all input tensors, each dimension rounded up to a power of two
    shapes: tuple[tuple[int, ...], ...]
    options: tuple[object, ...]  #: Numbers, strings and truth values among the inputs
    #: True if functions are among the inputs; such passes are never equal, because a function can do anything
    opaque: bool = False

    @property
    def evaluation(self) -> bool:
        """True if the pass does not belong to a training step."""
        return not (self.training or self.grad)

    def serves(self, other: PassKey) -> bool:
        """Return True if a trace of this pass serves another of any numbers and no larger shapes."""

        def texts(key: PassKey) -> list[object]:
            return [option for option in key.options if isinstance(option, bool | str)]

        def is_as_large(own: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
            return len(own) == len(theirs) and all(map(int.__ge__, own, theirs))

        same = replace(self, shapes=other.shapes, options=other.options) == other
        return (
            same
            and texts(self) == texts(other)
            and len(self.shapes) == len(other.shapes)
            and all(map(is_as_large, self.shapes, other.shapes))
        )


def pass_key(
    name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[PassKey, int]:
    """Return the key of a call, and the number of elements of its inputs."""
    leaves = tree_leaves((args, sorted(kwargs.items())))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shapes = tuple(tuple(1 << (n - 1).bit_length() if n else 0 for n in t.shape) for t in tensors)
    options = tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | float | str))
    opaque = any(callable(leaf) for leaf in leaves)
    key = PassKey(name, module.training, torch.is_grad_enabled(), shapes, options, opaque)
    return key, sum(t.numel() for t in tensors)


@dataclass(frozen=True)
class AccessTrace:
    """Recorded cycle."""

    keys: tuple[PassKey, ...]  #: Identity of each pass
    elements: tuple[int, ...]  #: Number of input elements of each pass
    starts: tuple[int, ...]  #: First access of each pass
    accesses: tuple[Access, ...]
    before: tuple[int, ...]  #: Bytes of other tensors at the beginning of each access
    #: Saved tensors of the forward pass, which can be offloaded
    spans: Mapping[SpanKey, Span] = field(default_factory=dict)
    kept: frozenset[SpanKey] = frozenset()  #: Spans that were not offloaded, and count as other memory
    grads: tuple[bool, ...] = ()  #: True for accesses while gradients were recorded

    def place(self, position: int, chunks: frozenset[Chunk], grad: bool) -> int | None:
        """Return the place of an access that may come at ``position``; None if there is none.

        A run of accesses without gradients, such as recycling, may be left from any place, or repeated from its start.
        """
        wanted = chunks, grad
        if self._token(position) == wanted:
            return position
        place = position
        if grad:
            while place < len(self.grads) and not self.grads[place]:
                place += 1
        else:
            while place > 0 and not self.grads[place - 1]:
                place -= 1
        return place if self._token(place) == wanted else None

    def _token(self, place: int) -> tuple[frozenset[Chunk], bool] | None:
        return (self.accesses[place].chunks, self.grads[place]) if place < len(self.accesses) else None


class AccessRecorder:
    """Recorder of one cycle."""

    def __init__(self) -> None:
        self.keys: list[PassKey] = []
        self.elements: list[int] = []
        self._starts: list[int] = []
        self._chunks: list[frozenset[Chunk]] = []
        self._others: list[int] = []
        self._before: list[int] = []
        self._grads: list[bool] = []
        self._saved: dict[SpanKey, tuple[int, int]] = {}
        self._used: dict[SpanKey, int] = {}
        self.kept: set[SpanKey] = set()
        self.calls = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def begin(self, key: PassKey, elements: int) -> None:
        """Begin a pass."""
        self.keys.append(key)
        self.elements.append(elements)
        self._starts.append(len(self._chunks))

    def access(self, chunks: frozenset[Chunk], before: int) -> None:
        """Begin an access that uses only these chunks, with ``before`` bytes of other tensors."""
        self._chunks.append(chunks)
        self._before.append(before)
        self._grads.append(torch.is_grad_enabled())
        self._others.append(0)

    def measured(self, other: int) -> None:
        """Record the peak of other tensors in bytes since the last access."""
        if self._others:
            self._others[-1] = max(self._others[-1], other)

    def saved(self, key: SpanKey, size: int) -> None:
        """Record a new offloadable tensor; its size in bytes may be corrected later."""
        first = self._saved[key][1] if key in self._saved else max(0, len(self) - 1)
        self._saved[key] = (size, first)

    def used(self, key: SpanKey) -> None:
        """Record the use of an offloadable tensor."""
        if key in self._saved:
            self._used.setdefault(key, max(0, len(self) - 1))

    def trace(self) -> AccessTrace:
        """Return the cycle recorded so far."""
        spans = {
            key: Span(size, first, self._used[key])
            for key, (size, first) in self._saved.items()
            if key in self._used
        }
        return AccessTrace(
            tuple(self.keys),
            tuple(self.elements),
            tuple(self._starts),
            tuple(map(Access, self._chunks, self._others)),
            tuple(self._before),
            spans,
            frozenset(self.kept),
            tuple(self._grads),
        )


# Number of remembered cycles, a limit for inputs of many different shapes.
REMEMBERED = 256


class TraceBook:
    """Latest recorded cycles, from which the rest of a cycle is predicted."""

    def __init__(self) -> None:
        self._traces: dict[tuple[PassKey, ...], AccessTrace] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def expect(self, keys: Sequence[PassKey], elements: Sequence[int]) -> AccessTrace | None:
        """Return the latest cycle with these first passes and at least these sizes; None if there is none.

        Without such a cycle, it is the smallest one of larger shapes or other numbers; the longest among equals.
        """
        # A pass with more elements than recorded may need more memory, so it is recorded again.
        count = len(keys)
        if any(key.opaque for key in keys):
            return None
        large = [
            trace
            for trace in reversed(self._traces.values())
            if len(trace.keys) >= count and all(map(int.__ge__, trace.elements, elements))
        ]
        exact = (trace for trace in large if trace.keys[:count] == tuple(keys))
        others = [trace for trace in large if all(map(PassKey.serves, trace.keys, keys))]
        smallest = min(others, key=lambda t: (t.elements[:count], -len(t.accesses)), default=None)
        return next(exact, smallest)

    def keep(self, trace: AccessTrace) -> AccessTrace:
        """Store a cycle as the latest, with the largest memory ever recorded at each access, and return it."""
        # If nothing has changed, the earlier object stays.
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
            spans = {
                key: replace(span, size=max(span.size, known.spans.get(key, span).size))
                for key, span in trace.spans.items()
            }
            trace = replace(trace, elements=elements, accesses=accesses, before=before, spans=spans)
            if trace == known:
                trace = known
        self._traces[trace.keys] = trace
        return trace


def _chunks(trace: AccessTrace) -> list[frozenset[Chunk]]:
    return [access.chunks for access in trace.accesses]
