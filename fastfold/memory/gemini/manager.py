"""One line that trains a model larger than its device.

    manager = Gemini(model, optimizer, budget="20GiB")
    loss = model(batch)
    loss.backward()
    manager.step()
    manager.zero_grad()

In the spirit of Colossal-AI's Gemini (Fang et al. 2022, "Parallel Training of Pre-Trained Models via Chunk-Based
Dynamic Memory Management"): chunks of parameters come to the device when the operators need them, in an order that the
last steps have shown; gradients and optimizer states live on the host, where the optimizer works.
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
from fastfold.memory.gemini.optimizer.overlapped import MIN_OVERLAPPED_CHUNKS, OverlappedStep, check_overlap
from fastfold.memory.gemini.optimizer.step import OptimizerStep
from fastfold.memory.gemini.state_hooks import StateHooks
from fastfold.utils.units import parse_bytes

POLICIES = ("auto", "cuda", "cpu", "nvme")


class Gemini:
    """Manages where a model's parameters, gradients and optimizer states live.

    The model is used as before. The optimizer's turn is :meth:`step`, and :meth:`zero_grad` clears gradients;
    ``state_dict()`` of the model, of its modules and of the optimizer and their counterparts work as ever, whatever the
    placement. Outside a pass and :meth:`params_on_host`, parameters have a shape and no numbers: whoever reads them, or
    gradients that are on the host, gets a ConfigError that says what to use (with ``"cuda"``, gradients alone).

    Args:
        model: Any module. Its parameters may be frozen, shared or unused; which there are and which of them train is
            fixed from here on: :meth:`step` refuses others.
        optimizer: Of these parameters; any that treats each parameter alone, which is tried out. It works on the host,
            chunk by chunk. None for inference.
        budget: Bytes on the device for chunks and activations together, such as ``"20GiB"``.
        policy: ``"auto"``: on the host, and on the device by the planner. ``"cpu"``: the same, but off the device after
            each use. ``"nvme"``: as ``auto``, in memory-mapped files instead of the host's memory. ``"cuda"``: all on
            the device, so a budget smaller than parameters, gradients and optimizer states together is refused.
        device: What computes; None for a GPU where there is one, else a simulated device of that budget.
        nvme_folder: Folder for ``"nvme"``; None for the system's folder of temporary files. Parameters, gradients and
            optimizer states have one file there, whose room is reserved now.
        lookahead: Operators by which loads start early.
        group: Process group of data parallelism: all start from the first rank's parameters and buffers, and
            :meth:`step` averages gradients over it. It must reach the tier that gradients live on: the host's memory,
            or the device with ``"cuda"``.
        statistics: Process group whose ranks decide alike, on the host; None for ``group``. All its ranks call
            :meth:`step` together.
        shard: Over ``group``, each rank keeps the optimizer's states of its share of the parameters alone (ZeRO stage
            1); :meth:`state_dict` is a collective then.
        activations: Saved tensors are planned too: what the budget has no room for goes to the host until the backward
            pass. Not with ``"cuda"``, under which nothing leaves the device.
        recompute: Modules that may be recomputed in the backward pass instead, such as the blocks of a network (which
            then must not checkpoint them itself): call by call the plan decides.
        hard_budget: On a GPU, PyTorch's allocator keeps to the budget too, until :meth:`release`: what would go over it
            raises ``torch.OutOfMemoryError`` (:meth:`fastfold.memory.CudaDevice.enforce`). Otherwise plans keep to it,
            as far as what they were made from comes again. A simulated device always keeps to it.
        overlap_optimizer: A chunk's step runs in a thread as soon as the backward pass has computed all of its
            gradients, and :meth:`step` waits for the last ones; results are those of a step afterwards, bit by bit.
            For a backward pass on a GPU; one on the CPU is slowed down by more than is gained.
            Learning rates are set before ``backward()`` then, a step cannot be left out, nothing may look at gradients
            before it (clipping by a global norm, loss scaling, means over processes), and backward passes that only
            add to gradients are wrapped in :meth:`no_sync`.

    Raises:
        BudgetError: One operator's parameters alone (with ``"cuda"``: all parameters, gradients and optimizer states)
            exceed the budget; names the smallest that holds them. With ``hard_budget``: PyTorch holds more already.
            The host's memory has no room for what is kept there, as far as limits of control groups leave any.
        OutputError: With ``"nvme"``: the disk has no room for parameters, gradients and optimizer states.
        ConfigError: An unknown policy or budget; models that differ over ``group``; an optimizer of other parameters,
            or that does not treat each parameter alone; parameters that are managed already; modules with sparse
            gradients; ``overlap_optimizer`` with ``"cuda"``, without an optimizer, with several processes, or with an
            optimizer whose step has hooks or cannot run in a thread.
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
        overlap_optimizer: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"there is no memory policy {policy!r}; choose one of {', '.join(POLICIES)}")
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.ranks = Ranks(group, statistics, shard)
        self.budget = parse_bytes(budget)
        self.device = _device(device, self.budget)
        check_model(model, optimizer)
        self.ranks.check_model(model)
        if overlap_optimizer:
            check_overlap(optimizer, policy, self.ranks)
        self._undo: list[Callable[[], None]] = []
        largest = self.budget // 8
        if overlap_optimizer:
            largest = min(largest, sum(p.nbytes for p in model.parameters()) // MIN_OVERLAPPED_CHUNKS)
        chunks = build_chunks(model, largest=largest)
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
        self.overlap: OverlappedStep | None = None
        self._optimizer_step: OptimizerStep | None = None
        if optimizer is not None:
            self.overlap = OverlappedStep(optimizer, self.store) if overlap_optimizer else None
            self._optimizer_step = OptimizerStep(optimizer, self.store, self.ranks, self.overlap)
            self._undo.append(self._optimizer_step.remove)
            self._optimizer_step.settle_states()
        self._hooks = ModuleHooks(model, self.store, self.residency, self.saved, self.overlap)
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
        """Before :meth:`step`: scale all gradients down to a norm, as ``torch.nn.utils.clip_grad_norm_`` does.

        Over a group it is the mean gradient that is clipped, and all ranks call this together.

        Args:
            max_norm: Largest norm of all gradients together.

        Returns:
            Their norm before, ``[]``.

        Raises:
            ConfigError: Called inside :meth:`params_on_host`, where PyTorch's own function works; or with
                ``overlap_optimizer``, under which steps do not wait for all gradients.
        """
        if self.overlap is not None:
            raise ConfigError(
                "clip_grad_norm_() needs all gradients before the first step of a parameter, which overlap_optimizer "
                "does not wait for: set overlap_optimizer=False, or clip nothing"
            )
        self._gather_gradients("clip_grad_norm_()")
        with self.store.work(), torch.no_grad():
            gradients = self.store.gradients(self.model.parameters())
            norm = nn.utils.get_total_norm(gradients)
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.mul_(scale)
        return norm

    def _gather_gradients(self, what: str) -> None:
        """Gradients of all ranks are on the host."""
        if self.store.on_host:
            raise ConfigError(f"leave params_on_host() before {what}, so that what was changed there counts")
        if self.device.device.type == "cuda":
            torch.cuda.current_stream(self.device.device).synchronize()
        self.residency.end_step()
        self.store.device.settle()
        self.ranks.average(self.store)

    def step(self) -> None:
        """The optimizer's step, on the host, for every parameter that has a gradient.

        States that the step makes are allocated before it begins, so that where there is no room nothing is changed.

        Raises:
            BudgetError: With ``"cuda"``: states do not fit on the device.
            ConfigError: There is no optimizer; a parameter trains, or is in the model or the optimizer, that was not
                when the manager was made; an earlier step has failed half way; called inside
                :meth:`params_on_host`; or with ``overlap_optimizer`` a rate was changed since ``backward()``.
        """
        if self.optimizer is None or self._optimizer_step is None:
            raise ConfigError("there is no optimizer: give one to Gemini(model, optimizer)")
        self._optimizer_step.check_whole()
        check_step(self.model, self.optimizer, self.store)
        self._gather_gradients("step()")
        self.residency.exchange()
        self._optimizer_step.run()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, as under ``DistributedDataParallel``, a backward pass adds to gradients, and no step follows it.

        It matters with ``overlap_optimizer`` alone, which has to know the last of several backward passes.
        """
        return nullcontext() if self.overlap is None else self.overlap.no_sync()

    def zero_grad(self) -> None:
        """Forgets all gradients, as ``optimizer.zero_grad(set_to_none=True)``."""
        self.residency.end_step()
        self.store.clear_gradients()

    def _take_states(self) -> None:
        """The optimizer has states that it was given."""
        if self._optimizer_step is not None:
            self._optimizer_step.settle_states()

    # Plain views

    def params_on_host(self) -> AbstractContextManager[None]:
        """Inside, all parameters and gradients are plain tensors on the host.

        For what looks at or changes many of them: averages of weights, gradients by hand, initialisation. No pass runs
        and no step is taken before it is left.
        """
        self.residency.end_step()
        return self.store.params_on_host() if self._managing else nullcontext()

    def release(self) -> None:
        """Ends the management: from now on parameters, gradients and optimizer states are plain tensors on the host."""
        self.store.refuse_ahead("the management ends")
        self._managing = False
        self._hooks.remove()
        for undo in self._undo:
            undo()
        self._undo = []
        self.store.release()

    def state_dict(self) -> dict[str, Any]:
        """Plain state dicts ``{"model": …, "optimizer": …}``, equal to those of an unmanaged run.

        Sharded, ``optimizer.state_dict()`` alone gives a rank's share.

        Raises:
            ConfigError: A step has failed half way.
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
        """Takes what :meth:`state_dict` gave, or the state dicts of an unmanaged run; also after a pass that raised."""
        self.residency.interrupt()
        if self.overlap is not None:
            self.overlap.abandon()
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
