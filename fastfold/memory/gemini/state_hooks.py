"""Hooks that make state dicts of a managed model, its modules and its optimizer equal to unmanaged ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fastfold.memory.gemini.checks import NotCopied


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
