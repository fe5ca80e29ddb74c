"""Placement of a run's parameters, gradients and optimizer states on device or host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import BlockStack
from fastfold.memory import Gemini, GeminiConfig, parse_bytes
from fastfold.parallel import DistributedContext, ParallelOptimizer
from fastfold.training.config import MemoryConfig, TrainConfig


class Placement:
    """Placement of everything on the device."""

    def __init__(self, optimizer: ParallelOptimizer) -> None:
        self._optimizer = optimizer

    def params_on_host(self) -> AbstractContextManager[None]:
        """Return a context in which parameters and gradients are plain tensors that may be read and changed."""
        return nullcontext()

    def running(self) -> AbstractContextManager[None]:
        """Return a context for running the network."""
        return nullcontext()

    def step(self, ok: Tensor | None = None) -> Callable[[], None]:
        """Run the optimizer's step and clear the gradients.

        Argument and result are those of :meth:`fastfold.parallel.ParallelOptimizer.step`.
        """
        undo: Callable[[], None] = self._optimizer.step(ok=ok)
        self._optimizer.zero_grad()
        return undo


class Managed(Placement):
    """Placement by :class:`fastfold.memory.Gemini`, within a budget.

    The network is on the host; all processes make the same decisions.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ParallelOptimizer,
        memory: MemoryConfig,
        context: DistributedContext,
    ) -> None:
        super().__init__(optimizer)
        assert memory.policy is not None
        blocks = [block for m in model.modules() if isinstance(m, BlockStack) for block in m.blocks]
        config = GeminiConfig(
            memory.budget,
            memory.policy,
            device=context.device,
            nvme_folder=memory.folder,
            hard_budget=memory.hard_budget,
            recompute=blocks if memory.checkpointing and memory.policy != "cuda" else (),
            statistics=context.cpu_group,
        )
        self.manager = Gemini(model, optimizer.inner, config)

    def params_on_host(self) -> AbstractContextManager[None]:
        """Return a context in which parameters and gradients are plain tensors on the host."""
        return self.manager.params_on_host()

    def running(self) -> AbstractContextManager[None]:
        """Return a context in which operators allocate device memory."""
        return self.manager.device.running()

    def step(self, ok: Tensor | None = None) -> Callable[[], None]:
        """Run the optimizer's step on the host; ``ok`` must be None, because the host decides before."""
        assert ok is None
        self.manager.step()
        self.manager.zero_grad()
        return lambda: None


def place(
    model: nn.Module, optimizer: ParallelOptimizer, memory: MemoryConfig, context: DistributedContext
) -> Placement:
    """Create the placement that the configuration selects.

    Raises:
        BudgetError: The budget is too small for the network; the message names the smallest that works.
    """
    return Placement(optimizer) if memory.policy is None else Managed(model, optimizer, memory, context)


def check_memory(config: TrainConfig, context: DistributedContext) -> None:
    """Refuse settings that memory management does not support.

    Raises:
        ConfigError: An unsupported setting is set together with ``memory.policy``.
    """
    if config.memory.policy is None:
        return
    parse_bytes(config.memory.budget)
    if config.optim.name == "muon":
        raise ConfigError(
            "memory.policy does not support optim.name=muon: a manager steps flat chunks, Muon whole matrices; "
            "set optim.name=adam or memory=checkpointing"
        )
    if context.mesh.plan.zero:
        raise ConfigError(
            "memory.policy does not support parallel.zero: with a policy optimizer states are on the host, and "
            "sharding them over GPUs saves nothing; set parallel.zero=0 or memory=checkpointing"
        )
    if context.size > 1 and context.device.type == "cuda" and config.memory.policy != "cuda":
        raise ConfigError(
            "memory.policy keeps gradients on the host, where several processes with GPUs cannot sum them yet; "
            "train with one process, memory.policy=cuda, or memory=checkpointing"
        )
    if config.trainer.compile:
        raise ConfigError(
            "memory.policy does not support trainer.compile: compiled blocks would keep references to parameters that "
            "have left the device; set trainer.compile=false or memory=checkpointing"
        )
