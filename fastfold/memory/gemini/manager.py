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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastfold.errors import ConfigError
from fastfold.memory.devices.device import CudaDevice, Device
from fastfold.memory.devices.simulated import SimulatedDevice
from fastfold.memory.devices.tiers import NvmeTier, Tier
from fastfold.memory.gemini.activations import SavedTensors
from fastfold.memory.gemini.chunk_store import ChunkStore, state_bytes
from fastfold.memory.gemini.chunks import Chunk, build_chunks
from fastfold.memory.gemini.distributed import Ranks
from fastfold.memory.gemini.executor import Residency
from fastfold.memory.gemini.module_hooks import ModuleHooks
from fastfold.memory.planner.schedule import BudgetError
from fastfold.utils.units import parse_bytes

POLICIES = ("auto", "cuda", "cpu", "nvme")


class Gemini:
    """Manages where a model's parameters, gradients and optimizer states live.

    The model is used as before. The optimizer's turn is :meth:`step`, and :meth:`zero_grad` clears gradients;
    ``model.state_dict()``, ``optimizer.state_dict()`` and their counterparts work as ever, whatever the placement.

    Args:
        model: Any module. Its parameters may be frozen, shared or unused; which are trainable is fixed from here on.
        optimizer: Of these parameters; any of ``torch.optim`` that treats each parameter alone. It works on the host,
            chunk by chunk. None for inference.
        budget: Bytes on the device for chunks and activations together, such as ``"20GiB"``.
        policy: ``"auto"``: on the host, and on the device by the planner. ``"cpu"``: the same, but off the device after
            each use. ``"nvme"``: as ``auto``, in memory-mapped files instead of the host's memory. ``"cuda"``: all on
            the device, so a budget smaller than parameters, gradients and optimizer states together is refused.
        device: What computes; None for a GPU where there is one, else a simulated device of that budget.
        nvme_folder: Folder for ``"nvme"``; None for the system's folder of temporary files.
        lookahead: Operators by which loads start early.
        group: Process group of data parallelism: :meth:`step` averages gradients over it. It must reach the tier that
            gradients live on: the host's memory, or the device with ``"cuda"``.
        statistics: Process group whose ranks decide alike, on the host; None for ``group``. All its ranks call
            :meth:`step` together.
        shard: Over ``group``, each rank keeps the optimizer's states of its share of the parameters alone (ZeRO stage
            1); :meth:`state_dict` is a collective then.
        activations: Saved tensors are planned too: what the budget has no room for goes to the host until the backward
            pass. Not with ``"cuda"``, under which nothing leaves the device.
        recompute: Modules that may be recomputed in the backward pass instead, such as the blocks of a network (which
            then must not checkpoint them itself): call by call the plan decides.

    Raises:
        BudgetError: One operator's parameters alone (with ``"cuda"``: all parameters, gradients and optimizer states)
            exceed the budget; names the smallest that holds them.
        ConfigError: An unknown policy or budget, or an optimizer of other parameters.
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
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"there is no memory policy {policy!r}; choose one of {', '.join(POLICIES)}")
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.ranks = Ranks(group, statistics, shard)
        self.budget = parse_bytes(budget)
        self.device = _device(device, self.budget)
        chunks = build_chunks(model, largest=self.budget // 8)
        known = {slot.parameter for chunk in chunks for slot in chunk.slots}
        for parameter in (p for g in optimizer.param_groups for p in g["params"]) if optimizer else ():
            if parameter not in known:
                raise ConfigError(
                    "the optimizer has parameters that the model does not have; make it from this model"
                )
        for buffer_owner in model.modules():
            for name, buffer in buffer_owner.named_buffers(recurse=False):
                setattr(buffer_owner, name, buffer.to(self.device.device))
                self.device.hold(getattr(buffer_owner, name))
        self._check_smallest(chunks)
        self.store = ChunkStore(chunks, self.device, self._host_tier(nvme_folder))
        agree = self.ranks.agree if self.ranks.statistics else None
        self.residency = Residency(self.store, self.budget, policy != "cpu", lookahead, agree)
        self._undo: list[Callable[[], None]] = []
        self.saved: SavedTensors | None = None
        if activations and policy != "cuda":
            self.saved = SavedTensors(self.device, self.store.host, self.residency)
            self._undo.append(self.saved.manage(recompute))
        self._hooks = ModuleHooks(model, self.store, self.residency, self.saved)
        self._stepping, self._managing = False, True
        self._hook_checkpoints()

    def _check_smallest(self, chunks: Sequence[Chunk]) -> None:
        """Refuses what cannot work at once."""
        buffers = self.device.other_bytes()
        if self.policy == "cuda":
            states = state_bytes(self.optimizer) if self.optimizer is not None else 0
            trained = sum(chunk.nbytes + chunk.numel * states for chunk in chunks if chunk.trainable)
            smallest = buffers + sum(chunk.nbytes for chunk in chunks)
            smallest += trained if self.optimizer is not None else 0
            what = "policy 'cuda' keeps parameters, gradients and optimizer states on the device, which"
            remedy = "activations come on top. Policy 'auto' needs no more than one operator at a time"
        else:
            smallest = buffers + max((chunk.nbytes for chunk in chunks), default=0)
            what = "one operator's parameters and the model's buffers"
            remedy = "no smaller budget works, and activations come on top"
        if smallest > self.budget:
            raise BudgetError(
                f"a budget of {self.budget:,} bytes is too small: {what} take {smallest:,} bytes; {remedy}",
                smallest,
            )

    def _host_tier(self, folder: str | os.PathLike[str] | None) -> Tier:
        if self.policy == "cuda":
            return self.device
        if self.policy == "nvme":
            return NvmeTier(folder)
        return Tier(pinned=self.device.device.type == "cuda")

    # The optimizer

    def step(self) -> None:
        """The optimizer's step, on the host, for every parameter that has a gradient.

        Raises:
            ConfigError: There is no optimizer.
        """
        optimizer = self.optimizer
        if optimizer is None:
            raise ConfigError("there is no optimizer: give one to Gemini(model, optimizer)")
        if self.device.device.type == "cuda":
            torch.cuda.current_stream(self.device.device).synchronize()
        self.residency.exchange()
        self.ranks.average(self.store)
        groups = [group["params"] for group in optimizer.param_groups]
        self._stepping = True
        try:
            for chunk in self.store.chunks:
                if not chunk.arrived:
                    continue
                if self.ranks.owns(chunk):
                    here = {slot.parameter for slot in chunk.slots}
                    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                        group["params"] = [p for p in parameters if p in here]
                    with self.store.params_on_host([chunk]):
                        optimizer.step()
                    self.store.settle_states(chunk, optimizer)
                self.ranks.broadcast_params(self.store, chunk)
        finally:
            self._stepping = False
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters

    def zero_grad(self) -> None:
        """Forgets all gradients, as ``optimizer.zero_grad(set_to_none=True)``."""
        self.residency.end_step()
        self.store.clear_gradients()

    # Plain views

    def params_on_host(self) -> AbstractContextManager[None]:
        """Inside, all parameters and gradients are plain tensors on the host.

        For what looks at or changes many of them: clipping of gradients, averages of weights, initialisation.
        """
        self.residency.end_step()
        return self.store.params_on_host() if self._managing else nullcontext()

    def release(self) -> None:
        """Ends the management: from now on parameters, gradients and optimizer states are plain tensors on the host."""
        self._managing = False
        self._hooks.remove()
        for undo in self._undo:
            undo()
        self._undo = []
        self.store.release()

    def state_dict(self) -> dict[str, Any]:
        """Plain state dicts ``{"model": …, "optimizer": …}``, equal to those of an unmanaged run.

        Sharded, ``optimizer.state_dict()`` alone gives a rank's share.
        """
        states: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            self.ranks.gather_states(self.store.chunks, self.optimizer)
            states["optimizer"] = self.optimizer.state_dict()
            self.ranks.drop_states(self.store.chunks, self.optimizer)
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave, or the state dicts of an unmanaged run."""
        self.model.load_state_dict(states["model"])
        if self.optimizer is not None and "optimizer" in states:
            self.optimizer.load_state_dict(states["optimizer"])

    def _hook_checkpoints(self) -> None:
        """State dicts, and whatever reads all parameters, find them on the host."""
        entered: list[AbstractContextManager[None]] = []

        def enter(*_: Any) -> None:
            entered.append(self.params_on_host())
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        model = self.model
        handles: list[Any] = [
            model.register_state_dict_pre_hook(enter),
            model.register_state_dict_post_hook(leave),
            model.register_load_state_dict_pre_hook(enter),
            model.register_load_state_dict_post_hook(leave),
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        self._undo.append(undo)
        optimizer = self.optimizer
        if optimizer is None:
            return

        def loaded(*_: Any) -> None:
            self.ranks.drop_states(self.store.chunks, optimizer)
            for chunk in self.store.chunks:
                self.store.settle_states(chunk, optimizer)
            leave()

        def refuse(*_: Any) -> None:
            if not self._stepping:
                raise ConfigError(
                    "parameters and gradients are managed: call step() of the Gemini manager, not of the optimizer"
                )

        handles += [
            optimizer.register_load_state_dict_pre_hook(enter),
            optimizer.register_load_state_dict_post_hook(loaded),
            optimizer.register_step_pre_hook(refuse),
        ]
        self.ranks.drop_states(self.store.chunks, optimizer)
        for chunk in self.store.chunks:
            self.store.settle_states(chunk, optimizer)


def _device(device: Device | torch.device | str | None, budget: int) -> Device:
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return CudaDevice(budget, device) if device.type == "cuda" else SimulatedDevice(budget)
