"""Reduction of gradients at the end of every backward pass, as DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fastfold.parallel.data_parallel.fsdp import FullySharded
from fastfold.parallel.data_parallel.zero import Replicated
from fastfold.utils.module_structure import tensors_in


class BackwardReduction:
    """Averages gradients over the ranks when a backward pass through watched outputs ends.

    ``share``, one divided by the number of losses, multiplies each rank's gradient. ``has_reduced`` is True if any
    backward pass has reduced gradients.
    """

    def __init__(self, gradients: Replicated | FullySharded, share: float) -> None:
        self._gradients, self._share = gradients, share
        self._is_paused = self._is_running = self.has_reduced = False
        self._overlap = ExitStack()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Skip reduction in backward passes inside the context; later ones add to their gradients."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @torch.compiler.disable
    def watch(self, output: Any) -> None:
        """Reduce gradients at the end of backward passes that begin at an output."""
        if torch._C._current_graph_task_id() != -1:  # a forward pass that checkpoint() runs again
            return
        if self._is_running:  # an exception ended the last backward pass
            self._is_running = False
            self._overlap = ExitStack()
        for x in tensors_in(output):
            if x.requires_grad:
                x.register_hook(self._begin)

    def _begin(self, _: Tensor) -> None:
        if self._is_running:
            return
        self._gradients.set_aside()
        if self._is_paused:
            return
        self._is_running = True
        self._overlap.enter_context(self._gradients.overlapped(data=True))
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._is_running = False
        self._overlap.close()
        buffers = self._gradients.take_sample()
        with torch.no_grad():
            for buffer in buffers:
                buffer.mul_(self._share)
        self._gradients.finish(buffers)
        self.has_reduced = True
        self._gradients.add_set_aside()
