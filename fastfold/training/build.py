"""Construction of a run's network: weights, frozen parts, adapters, parallel plan, precision and placement.

Parameters, gradients and optimizer states are on the device, or where a memory manager places them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import BlockStack
from fastfold.evoformer.execution import ExecutionPolicy, set_policy
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import autocast_trunk
from fastfold.evoformer.primitives import Linear
from fastfold.evoformer.weights.checkpoint import read_weights
from fastfold.evoformer.weights.published import one_weights_file
from fastfold.memory import Gemini, GeminiConfig, parse_bytes
from fastfold.parallel import DistributedContext, Parallel, ParallelOptimizer, alphafold, parallelize
from fastfold.parallel.alphafold.convert import silent_parts
from fastfold.training.config import MemoryConfig, TrainConfig
from fastfold.training.lora import add_lora, freeze


def plain_network(config: TrainConfig, tree: ConfigDict) -> AlphaFold:
    """Build the network to train with its initial weights, on the CPU.

    Raises:
        WeightsError: The initial weights cannot be read or belong to another network.
        ConfigError: The channels of an attention are not divisible by its heads, or a pattern of parameters to freeze
            matches none.
    """
    torch.manual_seed(config.trainer.seed)
    model = AlphaFold(tree, name=config.model.name)
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and layer.out_features % layer.heads:
            raise ConfigError(
                f"{name.rpartition('.')[0]} has {layer.out_features} channels, which its {layer.heads} heads do not "
                "divide: change num_head or the channels in model.overrides"
            )
    if config.model.weights is not None:
        _, state = read_weights(one_weights_file(config.model.weights), config=tree)
        model.load_state_dict(state)
    if config.finetune.freeze:
        freeze(model, config.finetune.freeze)
    if config.finetune.lora_rank:
        add_lora(model, rank=config.finetune.lora_rank, alpha=config.finetune.lora_alpha)
    return model


def parallel_network(model: AlphaFold, config: TrainConfig, context: DistributedContext) -> Parallel:
    """Move a network to the run's device, under its plan and in training mode.

    The model is that of :func:`plain_network`, and is changed in place.

    Raises:
        ConfigError: The plan does not fit the network, or a setting does not go with memory management.
    """
    check_memory(config, context)
    managed = config.memory.policy is not None
    # A memory manager keeps parameters on the host and moves them to the device in chunks.
    if not managed:
        model.to(context.device)
    # Memory managers choose recomputation block by block, except with the policy cuda.
    model.set_checkpointing(config.memory.checkpointing and config.memory.policy in (None, "cuda"))
    if context.device.type == "cpu" and config.memory.checkpointing and not managed:
        # Blocks are recomputed one at a time, so that their projections take little memory.
        set_policy(model, ExecutionPolicy(keep_projections=True))
    # parallelize must precede autocast_trunk, which wraps forward.
    parallel = parallelize(model, context.mesh, dap=alphafold.shard)
    model = cast(AlphaFold, parallel.module)
    torch.set_float32_matmul_precision(config.trainer.matmul)
    if config.trainer.precision == "bf16":
        autocast_trunk(model, context.device.type, cache=not managed)
    if config.trainer.compile:
        for stack in (m for m in model.modules() if isinstance(m, BlockStack)):
            for block in stack.blocks:
                for part in silent_parts(block):
                    part.compile()
    model.train()
    return parallel


class Placement:
    """Placement on the device, or with a policy by :class:`fastfold.memory.Gemini` within a budget.

    With a policy the network is on the host, and all processes make the same decisions.

    Raises:
        BudgetError: The budget is too small for the network; the message names the smallest that works.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ParallelOptimizer,
        memory: MemoryConfig,
        context: DistributedContext,
    ) -> None:
        self._optimizer = optimizer
        self._manager: Gemini | None = None
        if memory.policy is None:
            return
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
        self._manager = Gemini(model, optimizer.inner, config)

    def params_on_host(self) -> AbstractContextManager[None]:
        """Return a context in which parameters and gradients are plain tensors that may be read and changed."""
        return nullcontext() if self._manager is None else self._manager.params_on_host()

    def running(self) -> AbstractContextManager[None]:
        """Return a context for running the network, in which a manager's operators allocate device memory."""
        return nullcontext() if self._manager is None else self._manager.device.running()

    def step(self, ok: Tensor | None = None) -> Callable[[], None]:
        """Run the optimizer's step and clear the gradients.

        Argument and result are those of :meth:`fastfold.parallel.ParallelOptimizer.step`. With a policy ``ok`` must be
        None, because the host decides before.
        """
        if self._manager is None:
            undo: Callable[[], None] = self._optimizer.step(ok=ok)
            self._optimizer.zero_grad()
            return undo
        assert ok is None
        self._manager.step()
        self._manager.zero_grad()
        return lambda: None


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
