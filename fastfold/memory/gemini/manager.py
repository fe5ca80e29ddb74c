"""Train a model larger than its device.

    manager = Gemini(model, optimizer, budget="20GiB")
    loss = model(batch)
    loss.backward()
    manager.step()
    manager.zero_grad()

Follows Colossal-AI's Gemini (Fang et al. 2022, "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory
Management"). Chunks of parameters are copied to the device when operators need them, in an order learned from earlier
steps. Gradients and optimizer states stay on the host, where the optimizer runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory.devices.device import CudaDevice, Device
from fastfold.memory.devices.disk_file import PAGE
from fastfold.memory.devices.simulated import SimulatedDevice
from fastfold.memory.devices.tiers import NvmeTier, Tier
from fastfold.memory.gemini.activations import SavedTensors
from fastfold.memory.gemini.budget import check_budget, check_host, kept_bytes
from fastfold.memory.gemini.checks import check_model, check_step
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import build_chunks
from fastfold.memory.gemini.distributed import Ranks
from fastfold.memory.gemini.executor import Residency
from fastfold.memory.gemini.module_hooks import ModuleHooks
from fastfold.memory.gemini.optimizer.step import OptimizerStep
from fastfold.memory.gemini.state_hooks import StateHooks
from fastfold.utils.units import parse_bytes

POLICIES = ("auto", "cuda", "cpu", "nvme")


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
        budget: Bytes on the device for chunks and activations together, for example ``"20GiB"``.
        policy: ``"auto"``: parameters on the host, and on the device as planned. ``"cpu"``: the same, but evicted after
            each use. ``"nvme"``: as ``auto``, in memory-mapped files instead of the host's memory. ``"cuda"``: all on
            the device; a budget smaller than parameters, gradients and optimizer states together is refused.
        device: Device of the model; None for a GPU if there is one, otherwise a simulated device of that budget.
        nvme_folder: Folder for ``"nvme"``; None for the system's folder of temporary files. One file there holds
            parameters, gradients and optimizer states; its space is reserved now.
        lookahead: Largest number of operators by which a load may precede its use.
        group: Process group of data parallelism. All ranks start from the first rank's parameters and buffers, and
            :meth:`step` averages gradients. Its backend must support the tier of the gradients: the host, or with
            ``"cuda"`` the device.
        statistics: Process group, on the host, whose ranks make equal plans; None for ``group``. All its ranks call
            :meth:`step` together.
        shard: Each rank of ``group`` keeps the optimizer's states of its share of the parameters only (ZeRO stage 1).
            :meth:`state_dict` is then a collective.
        activations: Plan saved tensors too: those over the budget are offloaded until the backward pass. Without effect
            with ``"cuda"``.
        recompute: Modules that may be recomputed in the backward pass instead, such as the blocks of a network. The
            plan decides for each call. The modules must not use activation checkpointing themselves.
        hard_budget: On a GPU, limit PyTorch's allocator to the budget until :meth:`release`. An allocation over it
            raises ``torch.OutOfMemoryError`` (:meth:`fastfold.memory.CudaDevice.enforce`). Otherwise only the plans
            keep to the budget, if steps repeat as recorded. A simulated device always keeps to it.

    Raises:
        BudgetError: One operator's parameters (with ``"cuda"``: all parameters, gradients and optimizer states) exceed
            the budget; names the smallest that holds them. With ``hard_budget``: PyTorch has reserved more already. Or
            the tensors kept on the host exceed its free memory, including limits of control groups.
        OutputError: With ``"nvme"``: the disk has too little space for parameters, gradients and optimizer states.
        ConfigError: An unknown policy or budget; models that differ over ``group``; an optimizer of other parameters,
            or one that does not treat each parameter alone; parameters that are managed already; modules with sparse
            gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        budget: str | int = "16GiB",
        policy: str = "auto",
        *,
        device: Device | torch.device | str | None = None,
        nvme_folder: str | os.PathLike[str] | None = None,
        lookahead: int = 2,
        group: dist.ProcessGroup | None = None,
        statistics: dist.ProcessGroup | None = None,
        shard: bool = False,
        activations: bool = True,
        recompute: Iterable[nn.Module] = (),
        hard_budget: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"unknown memory policy {policy!r}; choose one of {', '.join(POLICIES)}")
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.ranks = Ranks(group, statistics, shard)
        self.budget = parse_bytes(budget)
        self.device = _device(device, self.budget)
        check_model(model, optimizer)
        self.ranks.check_model(model)
        self._undo: list[Callable[[], None]] = []
        chunks = build_chunks(model, largest=self.budget // 8)
        for buffer_owner in model.modules():
            for name, buffer in buffer_owner.named_buffers(recurse=False):
                setattr(buffer_owner, name, buffer.to(self.device.device))
                self.device.hold(getattr(buffer_owner, name))
        check_budget(chunks, self.device, self.budget, policy, optimizer)
        host = self._host_tier(nvme_folder)
        own = [chunk for chunk in chunks if self.ranks.owns(chunk)]
        if policy == "nvme":
            host.preallocate(kept_bytes(own, chunks, optimizer, multiple=PAGE))
        elif policy != "cuda":
            check_host(kept_bytes(own, chunks, optimizer), chunks)
        if hard_budget:
            self._undo.append(self.device.enforce())
        self.store = ChunkStore(chunks, self.device, host)
        self.ranks.align(self.store, model)
        agree = self.ranks.agree if self.ranks.statistics else None
        self.residency = Residency(self.store, self.budget, policy != "cpu", lookahead, agree)
        self.saved: SavedTensors | None = None
        if activations and policy != "cuda":
            self.saved = SavedTensors(self.device, self.store.host, self.residency)
            self._undo.append(self.saved.manage(recompute))
        self._optimizer_step: OptimizerStep | None = None
        if optimizer is not None:
            self._optimizer_step = OptimizerStep(optimizer, self.store, self.ranks)
            self._undo.append(self._optimizer_step.remove)
            self._optimizer_step.settle_states()
        self._hooks = ModuleHooks(model, self.store, self.residency, self.saved)
        self._managing = True
        states = StateHooks(model, optimizer, self.params_on_host, self._take_states)
        self._undo.append(states.remove)

    def _host_tier(self, folder: str | os.PathLike[str] | None) -> Tier:
        if self.policy == "cuda":
            return self.device
        if self.policy == "nvme":
            return NvmeTier(folder)
        return Tier(pinned=self.device.device.type == "cuda")

    # The optimizer

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a norm before :meth:`step`, as ``torch.nn.utils.clip_grad_norm_``.

        With a group, the mean gradient is clipped, and all ranks call this together.

        Args:
            max_norm: Largest norm of all gradients together.

        Returns:
            Norm before scaling, ``[]``.

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

    def _take_states(self) -> None:
        """Shard loaded optimizer states and keep this rank's shard on the host."""
        if self._optimizer_step is not None:
            self._optimizer_step.settle_states()

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


def _device(device: Device | torch.device | str | None, budget: int) -> Device:
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return CudaDevice(budget, device) if device.type == "cuda" else SimulatedDevice(budget)
