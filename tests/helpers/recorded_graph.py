"""A stand-in for CUDA graphs on a CPU: operators are recorded with their tensors, and replayed on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.host_reads import NoHostReads


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors of an operator's arguments or results, which may be lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for x in tree:
            yield from _tensors(x)


class RecordedGraph(TorchDispatchMode):
    """What a CUDA graph is on a GPU: launches with the addresses that they read and write, and nothing else.

    While it records, host reads are refused. Afterwards memory of others is as it was before, as if nothing had run,
    and what was made while recording is overwritten with NaN, so that only a replay gives it contents.
    """

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._own: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self.replays = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        old = {_memory(x): x for x in _tensors((*args, *kwargs.values()))}
        if func._schema.is_mutable:
            for place, x in old.items():
                if place not in self._own and place not in self._before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                    self._before[place] = whole, whole.clone()
        found = func(*args, **kwargs)
        made = [x for x in _tensors(found) if _memory(x) not in old]
        self._own |= {_memory(x): x for x in made}
        if made or func._schema.is_mutable:  # a view is no launch
            self._launches.append((func, args, kwargs, made))
        return found

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for whole, content in self._before.values():
            whole.copy_(content)
        for x in self._own.values():
            if x.is_floating_point():
                x.fill_(torch.nan)

    def replay(self) -> None:
        """Run what was recorded, in its order."""
        self.replays += 1
        for func, args, kwargs, made in self._launches:
            found = func(*args, **kwargs)
            if made:
                for old, x in zip(made, [*_tensors(found)][-len(made) :], strict=True):
                    old.copy_(x)


def record(function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Stands for :func:`fastfold.inference.planning.cuda_graph.capture_graph`."""
    graph = RecordedGraph()
    with NoHostReads(), graph:
        found = function()
    return graph.replay, found
