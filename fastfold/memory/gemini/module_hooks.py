"""Hooks of a managed model: they report the running module, and move parameters to the host for state dicts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fastfold.errors import ConfigError
from fastfold.memory.gemini.access_trace import pass_key
from fastfold.memory.gemini.activations import SavedTensors
from fastfold.memory.gemini.checks import NotCopied
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import Chunk
from fastfold.memory.gemini.executor import Residency
from fastfold.memory.gemini.managed_parameter import untouched
from fastfold.utils.module_structure import tensors_in


class _Call:
    """Call of a module: its chunks, and the times of its beginning and end."""

    def __init__(self, module: nn.Module, chunks: tuple[int, ...], enter: int) -> None:
        self.module, self.chunks, self.enter, self.exit = module, chunks, enter, 1 << 60


class ModuleHooks(NotCopied):
    """Hooks on every module with parameters; each call loads its chunks and releases them.

    Without ``saved``, saved tensors are left to autograd.
    """

    def __init__(
        self, model: nn.Module, store: ChunkStore, residency: Residency, saved: SavedTensors | None
    ) -> None:
        self.model, self.store, self.residency, self.saved = model, store, residency, saved
        self._clock = count()
        self._stack: list[_Call] = []
        self._backward: dict[int, list[_Call]] = {}
        self._saving: AbstractContextManager[None] | None = None
        self._uses: dict[nn.Module, tuple[int, ...]] = {}
        self._handles: list[RemovableHandle] = []
        store.bring = self.use
        for name, module in model.named_modules():
            own = [store.chunk_of(p) for p in module.parameters(recurse=False)]
            self._uses[module] = tuple(dict.fromkeys(c.index for c in own if c is not None))
            # A module without own parameters may use its children's directly, and then needs their chunks.
            if module is model or next(module.parameters(), None) is not None:
                enter, leave = partial(self._enter, name), partial(self._leave)
                # Operators may use the parameters of a layer with these hooks without calling it.
                enter.observes = leave.observes = True  # type: ignore[attr-defined]
                self._handles += [
                    module.register_forward_pre_hook(enter, with_kwargs=True),
                    module.register_forward_hook(leave, always_call=True),
                ]
        for chunk in store.chunks:
            for slot in chunk.slots:
                if chunk.trainable:
                    with untouched():
                        handle = slot.parameter.register_post_accumulate_grad_hook(store.take_gradient)
                    self._handles.append(handle)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    # Forward

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A call within a backward pass recomputes, and belongs to the pass whose gradients are computed.
        if not self._stack and torch._C._current_graph_task_id() == -1:
            self._backward.clear()
            self.residency.begin_pass(*pass_key(name, module, args, kwargs))
            if self.saved is not None and torch.is_grad_enabled():
                self._saving = self.saved.hooks()
                self._saving.__enter__()
        call = _Call(module, self._uses[module], next(self._clock))
        try:
            if call.chunks or not self._stack:
                self._pin(call.chunks)
        except BaseException:
            self._stop_saving()
            raise
        self._stack.append(call)

    def _stop_saving(self) -> None:
        if not self._stack and self._saving is not None:
            saving, self._saving = self._saving, None
            saving.__exit__(None, None, None)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack or self._stack[-1].module is not module:
            return  # it raised before it was entered
        call = self._stack.pop()
        call.exit = next(self._clock)
        self._stop_saving()
        if call.chunks:
            self._pin((), release=call.chunks)
            if torch.is_grad_enabled():
                self._announce(call, output)
        if not self._stack and torch._C._current_graph_task_id() == -1:
            self.residency.end_pass()

    def _pin(self, chunks: tuple[int, ...], release: tuple[int, ...] = ()) -> None:
        self.residency.pin(chunks, release)
        if self.saved is not None:
            self.saved.begin_due()

    def use(self, chunk: Chunk) -> None:
        """Add a chunk, one of whose parameters a function uses, to the innermost running module."""
        # This covers modules that use their children's parameters directly.
        if not self._stack:
            return
        self.residency.forget_cycle()
        call = self._stack[-1]
        self._uses[call.module] = (*self._uses[call.module], chunk.index)
        self._pin((chunk.index,))
        call.chunks = (*call.chunks, chunk.index)

    # Backward

    def _announce(self, call: _Call, output: Any) -> None:
        """Add hooks to the nodes that made a call's outputs, where its backward pass begins."""
        for leaf in tensors_in(output):
            for tensor in (leaf, leaf._base if leaf._is_view() else None):
                if tensor is not None and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda gradients: self._before_backward(call))

    def _before_backward(self, call: _Call) -> None:
        """Pin the chunks of a call and release later calls, because nodes run in reverse order."""
        if torch.is_grad_enabled() and not self.store.fixed:
            raise ConfigError(
                "create_graph=True is not supported: a second backward pass would need parameters that have left the "
                "device; use policy 'cuda' of the Gemini manager"
            )
        task = torch._C._current_graph_task_id()
        if task not in self._backward:
            self._backward[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
        running = self._backward[task]
        if call in running:
            return
        done = [c for c in running if c.enter > call.exit]
        self._backward[task] = [*(c for c in running if c.enter <= call.exit), call]
        release = tuple(i for c in done for i in c.chunks)
        self._pin(call.chunks, release)

    def _end_backward(self, task: int) -> None:
        running = self._backward.pop(task, [])
        release = tuple(i for c in running for i in c.chunks)
        self._pin((), release)


class StateHooks(NotCopied):
    """Hooks of all modules that move parameters to the host while a state dict is made or loaded.

    ``on_host`` returns a context in which parameters are plain tensors on the host. ``loaded`` is called after the
    optimizer has loaded a state dict.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        on_host: Callable[[], AbstractContextManager[None]],
        loaded: Callable[[], None] | None,
    ) -> None:
        self._on_host, self._loaded = on_host, loaded
        self._entered: list[AbstractContextManager[None]] = []
        self._handles: list[Any] = []
        for module in model.modules():
            if next(module.parameters(), None) is not None:
                self._handles += [
                    module.register_state_dict_pre_hook(self._enter),
                    # PyTorch sets an attribute on this hook.
                    module.register_state_dict_post_hook(partial(self._leave)),
                    module.register_load_state_dict_pre_hook(self._enter),
                    module.register_load_state_dict_post_hook(self._leave),
                ]
        if optimizer is not None:
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(self._enter),
                optimizer.register_load_state_dict_post_hook(self._leave_optimizer),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, *_: Any) -> None:
        self._entered.append(self._on_host())
        self._entered[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        self._entered.pop().__exit__(None, None, None)

    def _leave_optimizer(self, *_: Any) -> None:
        assert self._loaded is not None
        self._loaded()
        self._leave()
