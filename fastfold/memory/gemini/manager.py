"""Train a model larger than its device.

    manager = Gemini(model, optimizer, GeminiConfig(budget="20GiB"))
    loss = model(batch)
    loss.backward()
    manager.step()
    manager.zero_grad()

Follows Colossal-AI's Gemini (Fang et al. 2022, "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory
Management"). Chunks of parameters are copied to the device when operators need them, in an order learned from earlier
steps. Gradients and optimizer states stay on the host, where the optimizer runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory.devices.disk_file import PAGE
from fastfold.memory.gemini.activations import SavedTensors
from fastfold.memory.gemini.checks import check_budget, check_host, check_model, check_step, kept_bytes
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import build_chunks
from fastfold.memory.gemini.config import GeminiConfig
from fastfold.memory.gemini.distributed import Ranks
from fastfold.memory.gemini.executor import Residency
from fastfold.memory.gemini.module_hooks import ModuleHooks, StateHooks
from fastfold.memory.gemini.optimizer.step import OptimizerStep

# Larger copies are not faster, and unknown steps load a chunk for each of its operators.
_LARGEST_CHUNK = 1 << 21


class Gemini:
    """Manager of a model's parameters, gradients and optimizer states on device, host and disk.

    The model is used without changes. :meth:`step` replaces the optimizer's step, and :meth:`zero_grad` clears
    gradients. ``state_dict()`` and ``load_state_dict()`` of the model, its modules and the optimizer work as usual.
    Outside a pass and :meth:`params_on_host`, parameters have a shape and no values. Terms of the loss that read
    trainable ones, such as weight penalties, use a copy on the device, which is not part of the budget. Other reads,
    and those of gradients on the host, raise a ConfigError with a remedy (with ``"cuda"``, only for gradients).

    Args:
        model: Any module. Its parameters may be frozen, shared or unused. They, and which of them are trainable, must
            not change from here on: :meth:`step` refuses others.
        optimizer: Optimizer of these parameters that treats each parameter alone, which is tested. It runs on the host,
            chunk by chunk. None for inference.
        config: Budget, policy and further settings; None for the defaults.
        settings: Fields of :class:`GeminiConfig`, in place of those of ``config``.

    Raises:
        BudgetError: One operator's parameters (with ``"cuda"``: all parameters, gradients and optimizer states) exceed
            the budget; names the smallest that holds them. With ``hard_budget``: PyTorch has reserved more already. Or
            the tensors kept on the host exceed its free memory, including limits of control groups.
        OutputError: With ``"nvme"``: the disk has too little space for parameters, gradients and optimizer states.
        ConfigError: ``config`` is another object; an unknown policy or budget; models that differ over
            ``group``; an optimizer of other parameters, or one that does not treat each parameter alone; parameters
            that are managed already; modules with sparse gradients.

    Example:
        >>> import copy
        >>> import torch
        >>> from torch import nn
        >>> from fastfold import Gemini
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))  # 133,120 bytes
        >>> plain, x = copy.deepcopy(model), torch.randn(4, 64)
        >>> manager = Gemini(model, torch.optim.Adam(model.parameters()), budget="64KiB", device="cpu")
        >>> with manager.device.running():  # only for a simulated device
        ...     model(x).square().mean().backward()
        >>> manager.step()
        >>> manager.device.peak <= 64 * 1024
        True

        With a plain optimizer, the weights are the same:

        >>> manager.release()
        >>> optimizer = torch.optim.Adam(plain.parameters())
        >>> plain(x).square().mean().backward()
        >>> optimizer.step()
        >>> all(torch.equal(own, other) for own, other in zip(model.parameters(), plain.parameters()))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        config: GeminiConfig | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(config, GeminiConfig | None):
            raise ConfigError(
                f"expected a GeminiConfig, found {config!r}; use GeminiConfig(budget={config!r})"
            )
        config = replace(config or GeminiConfig(), **settings)
        self.model, self.optimizer, self.config = model, optimizer, config
        self.ranks = Ranks(config.group, config.statistics, config.shard)
        self.budget = config.budget_bytes
        self.device = config.open_device()
        check_model(model, optimizer)
        self.ranks.check_model(model)
        self._undo: list[Callable[[], None]] = []
        chunks = build_chunks(model, largest=min(self.budget // 8, _LARGEST_CHUNK))
        for buffer_owner in model.modules():
            for name, buffer in buffer_owner.named_buffers(recurse=False):
                setattr(buffer_owner, name, buffer.to(self.device.device))
                self.device.hold(getattr(buffer_owner, name))
        check_budget(chunks, self.device, self.budget, config.policy, optimizer)
        host = config.open_host(self.device)
        own = [chunk for chunk in chunks if self.ranks.owns(chunk)]
        if config.policy == "nvme":
            host.preallocate(kept_bytes(own, chunks, optimizer, multiple=PAGE))
        elif config.policy != "cuda":
            check_host(kept_bytes(own, chunks, optimizer), chunks)
        if config.hard_budget:
            self._undo.append(self.device.enforce())
        self.store = ChunkStore(chunks, self.device, host)
        self.ranks.align(self.store, model)
        agree = self.ranks.agree if self.ranks.statistics else None
        self.residency = Residency(self.store, self.budget, config.policy != "cpu", config.lookahead, agree)
        self.saved: SavedTensors | None = None
        if config.activations and config.policy != "cuda":
            self.saved = SavedTensors(self.device, self.store.host, self.residency)
            self._undo.append(self.saved.manage(config.recompute))
        self._optimizer_step: OptimizerStep | None = None
        if optimizer is not None:
            self._optimizer_step = OptimizerStep(optimizer, self.store, self.ranks)
            self._undo.append(self._optimizer_step.remove)
            self._optimizer_step.settle_states()
        self._hooks = ModuleHooks(model, self.store, self.residency, self.saved)
        self._managing = True
        loaded = None if self._optimizer_step is None else self._optimizer_step.settle_states
        states = StateHooks(model, optimizer, self.params_on_host, loaded)
        self._undo.append(states.remove)

    # The optimizer

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a norm before :meth:`step`, and return the norm before, ``[]``.

        This is ``torch.nn.utils.clip_grad_norm_``. With a group, the mean gradient is clipped, and all ranks call this
        together.

        Raises:
            ConfigError: Called inside :meth:`params_on_host`, where PyTorch's own function works.
        """
        self._gather_gradients("clip_grad_norm_()")
        with self.store.work(), torch.no_grad():
            gradients = self.store.gradients(self.model.parameters())
            norm = nn.utils.get_total_norm(gradients)
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.mul_(scale)
        return norm

    def _gather_gradients(self, what: str) -> None:
        """Gather the gradients of all ranks on the host."""
        if self.store.on_host:
            raise ConfigError(f"leave params_on_host() before {what}, so that changes made there count")
        if self.device.device.type == "cuda":
            torch.cuda.current_stream(self.device.device).synchronize()
        self.residency.end_step()
        self.store.device.settle()
        self.ranks.average(self.store)

    def step(self) -> None:
        """Step the optimizer on the host, for every parameter with a gradient.

        Optimizer states are allocated first, so a failed allocation changes nothing.

        Raises:
            BudgetError: With ``"cuda"``: states do not fit on the device.
            ConfigError: The manager has no optimizer; a parameter of the model or the optimizer is new or newly
                trainable since the manager was made; an earlier step failed half way; or called inside
                :meth:`params_on_host`.
        """
        if self.optimizer is None or self._optimizer_step is None:
            raise ConfigError("step() needs an optimizer: pass one to Gemini(model, optimizer)")
        self._optimizer_step.check_whole()
        check_step(self.model, self.optimizer, self.store)
        self._gather_gradients("step()")
        self.residency.exchange()
        self._optimizer_step.run()

    def zero_grad(self) -> None:
        """Clear all gradients, as ``optimizer.zero_grad(set_to_none=True)``."""
        self.residency.end_step()
        self.store.clear_gradients()

    # Plain tensors

    def params_on_host(self) -> AbstractContextManager[None]:
        """Make all parameters and gradients plain tensors on the host inside.

        For code that reads or changes many of them: averages of weights, changes of gradients, initialisation. No pass
        or step can run before the context is left.
        """
        self.residency.end_step()
        return self.store.params_on_host() if self._managing else nullcontext()

    def release(self) -> None:
        """End the management: parameters, gradients and optimizer states become plain tensors on the host."""
        self._managing = False
        self._hooks.remove()
        for undo in self._undo:
            undo()
        self._undo = []
        self.store.release()

    def state_dict(self) -> dict[str, Any]:
        """Return plain state dicts ``{"model": …, "optimizer": …}``, equal to those of an unmanaged run.

        With ``shard``, ``optimizer.state_dict()`` contains only a rank's share.

        Raises:
            ConfigError: A step failed half way.
        """
        if self._optimizer_step is not None:
            self._optimizer_step.check_whole()
        states: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            self.ranks.gather_states(self.store.chunks, self.optimizer)
            states["optimizer"] = self.optimizer.state_dict()
            self.ranks.drop_states(self.store.chunks, self.optimizer)
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, or state dicts of an unmanaged run; also after a failed pass."""
        self.residency.interrupt()
        self.model.load_state_dict(states["model"])
        if self.optimizer is not None and "optimizer" in states:
            self.optimizer.load_state_dict(states["optimizer"])
        if self._optimizer_step is not None:
            self._optimizer_step.half_done = False
