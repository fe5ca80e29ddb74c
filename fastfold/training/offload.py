"""Where parameters, gradients and optimizer states of a run live, put on from outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import BlockStack
from fastfold.memory import Gemini, parse_bytes
from fastfold.parallel import DistributedContext, ParallelOptimizer
from fastfold.training.config import MemoryConfig, TrainConfig


class Placement:
    """All of it on the device, by PyTorch's own rules.

    Args:
        optimizer: The run's optimizer.
    """

    def __init__(self, optimizer: ParallelOptimizer) -> None:
        self._optimizer = optimizer

    def params_on_host(self) -> AbstractContextManager[None]:
        """Inside, parameters and gradients are plain tensors, to be read and changed at will."""
        return nullcontext()

    def running(self) -> AbstractContextManager[None]:
        """Inside, the network runs."""
        return nullcontext()

    def step(self, ok: Tensor | None = None) -> Callable[[], None]:
        """The optimizer's step, after which gradients are forgotten.

        Args:
            ok: As :meth:`fastfold.parallel.ParallelOptimizer.step` takes it.

        Returns:
            As it does.
        """
        undo = self._optimizer.step(ok)
        self._optimizer.zero_grad()
        return undo


class Managed(Placement):
    """As :class:`fastfold.memory.Gemini` plans it, within a budget.

    Args:
        model: The network, on the host.
        optimizer: Its optimizer; its states may be there already.
        memory: Budget and policy.
        context: The run's processes; they decide alike.
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
        self.manager = Gemini(
            model,
            optimizer.inner,
            memory.budget,
            memory.policy,
            device=context.device,
            nvme_folder=memory.folder,
            hard_budget=memory.hard_budget,
            recompute=blocks if memory.checkpointing and memory.policy != "cuda" else (),
            statistics=context.cpu_group,
        )

    def params_on_host(self) -> AbstractContextManager[None]:
        """Inside, parameters and gradients are plain tensors on the host."""
        return self.manager.params_on_host()

    def running(self) -> AbstractContextManager[None]:
        """Inside, operators take room on the device."""
        return self.manager.device.running()

    def step(self, ok: Tensor | None = None) -> Callable[[], None]:
        """The optimizer's step, on the host, which has to know whether it takes place."""
        assert ok is None
        self.manager.step()
        self.manager.zero_grad()
        return lambda: None


def place(
    model: nn.Module, optimizer: ParallelOptimizer, memory: MemoryConfig, context: DistributedContext
) -> Placement:
    """The placement that the configuration asks for.

    Args:
        model: The network.
        optimizer: Its optimizer, with its states.
        memory: Group ``memory``.
        context: The run's processes.

    Raises:
        BudgetError: The budget is too small for the network; names the smallest that works.
    """
    return Placement(optimizer) if memory.policy is None else Managed(model, optimizer, memory, context)


def check_memory(config: TrainConfig, context: DistributedContext) -> None:
    """Refuse settings that a managed network does not go together with.

    Raises:
        ConfigError: One of them is set.
    """
    if config.memory.policy is None:
        return
    parse_bytes(config.memory.budget)
    if config.optim.name == "muon":
        raise ConfigError(
            "memory.policy and optim.name=muon do not go together: a manager steps flat chunks, Muon whole matrices; "
            "set optim.name=adam or memory=checkpointing"
        )
    if context.mesh.plan.zero:
        raise ConfigError(
            "memory.policy and parallel.zero do not go together: with a policy optimizer states live on the host, and "
            "sharding them over GPUs gains nothing; set parallel.zero=0 or memory=checkpointing"
        )
    if context.size > 1 and context.device.type == "cuda" and config.memory.policy != "cuda":
        raise ConfigError(
            "memory.policy keeps gradients on the host, which several processes with GPUs cannot add up there yet; "
            "train with one process, memory.policy=cuda, or memory=checkpointing"
        )
    if config.trainer.compile:
        raise ConfigError(
            "memory.policy and trainer.compile do not go together: compiled blocks would hold on to parameters that "
            "have left the device; set trainer.compile=false or memory=checkpointing"
        )
