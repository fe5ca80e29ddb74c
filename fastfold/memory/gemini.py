"""One line that trains a model larger than its device.

    manager = Gemini(model, optimizer, budget="20GiB")
    loss = model(batch)
    loss.backward()
    manager.step()
    manager.zero_grad()

In the spirit of Colossal-AI's Gemini (Fang et al. 2022, "Parallel Training of Pre-Trained Models via Chunk-Based
Dynamic Memory Management"): chunks of parameters come to the device when the operators need them, in an order that the
last steps have shown; gradients and optimizer states live at home, where the optimizer works.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fastfold.errors import ConfigError

from .chunks import build_chunks
from .devices import CudaDevice, Device
from .residency import Residency
from .schedule import Access, BudgetError
from .simulated import SimulatedDevice
from .sizes import parse_bytes
from .store import ChunkStore
from .tiers import NvmeTier, Tier
from .trace import Trace, pass_key

POLICIES = ("auto", "cuda", "cpu", "nvme")


class _Call:
    """One call of a module: the chunks it needs, and when it began and ended."""

    def __init__(self, module: nn.Module, chunks: tuple[int, ...], enter: int) -> None:
        self.module, self.chunks, self.enter, self.exit = module, chunks, enter, 1 << 60


class Gemini:
    """Manages where a model's parameters, gradients and optimizer states live.

    The model is used as before. The optimizer's turn is :meth:`step`, and :meth:`zero_grad` clears gradients;
    ``model.state_dict()``, ``optimizer.state_dict()`` and their counterparts work as ever, whatever the placement.

    Args:
        model: Any module. Its parameters may be frozen, shared or unused; which are trainable is fixed from here on.
        optimizer: Of these parameters; any of ``torch.optim`` that treats each parameter alone. It works at home, chunk
            by chunk. None for inference.
        budget: Bytes on the device for chunks and activations together, such as ``"20GiB"``.
        policy: ``"auto"``: at home on the host; on the device by the planner. ``"cpu"``: likewise, but off the device
            after each use. ``"nvme"``: as ``auto``, at home in memory-mapped files. ``"cuda"``: all on the device.
        device: What computes; None for a GPU where there is one, else a simulated device of that budget.
        nvme_folder: Folder for ``"nvme"``; None for the system's folder of temporary files.
        lookahead: Operators by which loads start early.
        group: Process group of data parallelism: gradients are averaged over it and ranks decide alike. Every rank must
            make the same passes.

    Raises:
        BudgetError: One operator's parameters alone exceed the budget; names the smallest that works.
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
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"there is no memory policy {policy!r}; choose one of {', '.join(POLICIES)}")
        self.model, self.optimizer, self.policy, self.group = model, optimizer, policy, group
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
        self._check_smallest([chunk.nbytes for chunk in chunks])
        self.store = ChunkStore(chunks, self.device, self._home(nvme_folder))
        self.residency = Residency(self.store, self.budget, policy != "cpu", lookahead, self._agree)
        self._clock = count()
        self._stack: list[_Call] = []
        self._backward: dict[int, list[_Call]] = {}
        self._stepping = self._moving = False
        self._watch: _Watch | None = None
        self._uses: dict[nn.Module, tuple[int, ...]] = {}
        self._hook_model()
        self._hook_checkpoints()

    def _check_smallest(self, sizes: Sequence[int]) -> None:
        largest = max(sizes, default=0) + self.device.elsewhere()
        if largest > self.budget:
            raise BudgetError(
                f"a budget of {self.budget:,} bytes is too small: one operator's parameters and the model's buffers "
                f"take {largest:,} bytes; no smaller budget works, and activations come on top",
                largest,
            )

    def _home(self, folder: str | os.PathLike[str] | None) -> Tier:
        if self.policy == "cuda":
            return self.device
        if self.policy == "nvme":
            return NvmeTier(folder)
        return Tier(pinned=self.device.device.type == "cuda")

    # Hooks: forward

    def _hook_model(self) -> None:
        for name, module in self.model.named_modules():
            own = [self.store.chunk_of(p) for p in module.parameters(recurse=False)]
            self._uses[module] = tuple(dict.fromkeys(c.index for c in own if c is not None))
            if own or module is self.model:
                module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                module.register_forward_hook(self._leave, always_call=True)
        for chunk in self.store.chunks:
            for slot in chunk.slots:
                if chunk.trainable:
                    slot.parameter.register_post_accumulate_grad_hook(self.store.take_gradient)

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            # A call within a backward pass recomputes; it belongs to the pass whose gradients are computed.
            if not self._stack and torch._C._current_graph_task_id() == -1:
                self._backward.clear()
                self.residency.begin_pass(*pass_key(name, module, args, kwargs))
                self._watch = _Watch(self)
                self._watch.__enter__()
            call = _Call(module, self._uses[module], next(self._clock))
            try:
                self._pin(call.chunks)
            except BaseException:
                self._stop_watching()
                raise
            self._stack.append(call)

        return enter

    def _stop_watching(self) -> None:
        if not self._stack and self._watch is not None:
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack or self._stack[-1].module is not module:
            return  # It raised before it was entered.
        call = self._stack.pop()
        call.exit = next(self._clock)
        self._stop_watching()
        if call.chunks:
            self._pin((), release=call.chunks)
            if torch.is_grad_enabled():
                self._announce(call, output)
        if not self._stack and torch._C._current_graph_task_id() == -1:
            self.residency.end_pass()

    def _pin(self, chunks: tuple[int, ...], release: tuple[int, ...] = ()) -> None:
        self._moving = True
        try:
            self.residency.pin(chunks, release)
        finally:
            self._moving = False

    def use(self, parameter: nn.Parameter) -> None:
        """A function takes a parameter as an argument; from now on the innermost module called needs it.

        Modules that use their children's parameters themselves are found in this way.
        """
        chunk = self.store.chunk_of(parameter)
        if chunk is None or self._moving or not self._stack or chunk.index in self.residency.pinned:
            return
        call = self._stack[-1]
        self._uses[call.module] = (*self._uses[call.module], chunk.index)
        self._pin((chunk.index,))
        call.chunks = (*call.chunks, chunk.index)

    # Hooks: backward

    def _announce(self, call: _Call, output: Any) -> None:
        """The backward pass of a call begins at the nodes that made its outputs."""
        for leaf in _tensors(output):
            for tensor in (leaf, leaf._base if leaf._is_view() else None):
                if tensor is not None and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda gradients: self._before_backward(call))

    def _before_backward(self, call: _Call) -> None:
        """Nodes run in the reverse order of the forward pass: calls that began after this one ended are done."""
        task = torch._C._current_graph_task_id()
        if task not in self._backward:
            self._backward[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
        running = self._backward[task]
        if call in running:
            return
        done = [c for c in running if c.enter > call.exit]
        self._backward[task] = [*(c for c in running if c.enter <= call.exit), call]
        self._pin(call.chunks, release=tuple(i for c in done for i in c.chunks))

    def _end_backward(self, task: int) -> None:
        running = self._backward.pop(task, [])
        self._pin((), release=tuple(i for c in running for i in c.chunks))

    # The optimizer

    def step(self) -> None:
        """The optimizer's step, at home, for every parameter that has a gradient.

        Raises:
            ConfigError: There is no optimizer.
        """
        optimizer = self.optimizer
        if optimizer is None:
            raise ConfigError("there is no optimizer: give one to Gemini(model, optimizer)")
        if self.device.device.type == "cuda":
            torch.cuda.current_stream(self.device.device).synchronize()
        self.residency.end_step()
        groups = [group["params"] for group in optimizer.param_groups]
        self._stepping = True
        try:
            for chunk in self.store.chunks:
                if not chunk.arrived:
                    continue
                if self.group is not None:
                    with self.store.work():
                        dist.all_reduce(self.store.gradient(chunk), group=self.group)
                        self.store.gradient(chunk).div_(dist.get_world_size(self.group))
                here = {slot.parameter for slot in chunk.slots}
                for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                    group["params"] = [p for p in parameters if p in here]
                with self.store.at_home([chunk]):
                    optimizer.step()
                self.store.settle_states(chunk, optimizer)
        finally:
            self._stepping = False
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters

    def zero_grad(self) -> None:
        """Forgets all gradients, as ``optimizer.zero_grad(set_to_none=True)``."""
        self.residency.end_step()
        self.store.clear_gradients()

    # Plain views

    def at_home(self) -> AbstractContextManager[None]:
        """Inside, all parameters and gradients are plain tensors at home.

        For what looks at or changes many of them: clipping of gradients, averages of weights, initialisation.
        """
        return self.store.at_home()

    def state_dict(self) -> dict[str, Any]:
        """Plain state dicts ``{"model": …, "optimizer": …}``, equal to those of an unmanaged run."""
        states: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            states["optimizer"] = self.optimizer.state_dict()
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave, or the state dicts of an unmanaged run."""
        self.model.load_state_dict(states["model"])
        if self.optimizer is not None and "optimizer" in states:
            self.optimizer.load_state_dict(states["optimizer"])

    def _hook_checkpoints(self) -> None:
        """State dicts, and whatever reads all parameters, find them at home."""
        entered: list[AbstractContextManager[None]] = []

        def enter(*_: Any) -> None:
            entered.append(self.at_home())
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        self.model.register_state_dict_pre_hook(enter)
        self.model.register_state_dict_post_hook(leave)
        self.model.register_load_state_dict_pre_hook(enter)
        self.model.register_load_state_dict_post_hook(leave)
        optimizer = self.optimizer
        if optimizer is None:
            return

        def loaded(*_: Any) -> None:
            for chunk in self.store.chunks:
                self.store.settle_states(chunk, optimizer)
            leave()

        def refuse(*_: Any) -> None:
            if not self._stepping:
                raise ConfigError(
                    "parameters and gradients are managed: call step() of the Gemini manager, not of the optimizer"
                )

        optimizer.register_load_state_dict_pre_hook(enter)
        optimizer.register_load_state_dict_post_hook(loaded)
        optimizer.register_step_pre_hook(refuse)

    def _agree(self, trace: Trace) -> Trace:
        """All ranks take the largest memory that any of them has seen."""
        if self.group is None:
            return trace
        others = torch.tensor([access.other for access in trace.accesses])
        dist.all_reduce(others, dist.ReduceOp.MAX, group=self.group)
        accesses = tuple(Access(a.chunks, int(o)) for a, o in zip(trace.accesses, others, strict=True))
        return Trace(trace.keys, trace.elements, trace.starts, accesses, trace.before)


# What asks about a tensor without reading it.
_METADATA = {
    *(
        getattr(Tensor, n).__get__
        for n in ("shape", "dtype", "device", "layout", "requires_grad", "grad", "ndim")
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
}


class _Watch(TorchFunctionMode):
    """Sees parameters that functions take as arguments."""

    def __init__(self, manager: Gemini) -> None:
        super().__init__()
        self._manager = manager

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _METADATA:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    self._manager.use(leaf)
        return func(*args, **(kwargs or {}))


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors in a module's output: in containers, dataclasses and plain objects' attributes."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            yield from _tensors(list(vars(leaf).values()))


def _device(device: Device | torch.device | str | None, budget: int) -> Device:
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return CudaDevice(budget, device) if device.type == "cuda" else SimulatedDevice(budget)
