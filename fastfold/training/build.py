"""Construction of a run's network: weights, frozen parts, adapters, parallel plan and precision."""

from __future__ import annotations

from typing import Any, cast

import torch

from fastfold.evoformer.evoformer import BlockStack
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import autocast_trunk
from fastfold.evoformer.weights.checkpoint import read_weights
from fastfold.evoformer.weights.published import one_weights_file
from fastfold.parallel import DistributedContext, Parallel, alphafold, parallelize
from fastfold.parallel.alphafold.convert import silent_parts
from fastfold.training.config import TrainConfig
from fastfold.training.lora import add_lora, freeze
from fastfold.training.offload import check_memory


def plain_network(config: TrainConfig, tree: Any) -> AlphaFold:
    """Build the network to train with its initial weights, on the CPU.

    Raises:
        WeightsError: The initial weights cannot be read or belong to another network.
        ConfigError: A pattern of parameters to freeze matches none.
    """
    torch.manual_seed(config.trainer.seed)
    model = AlphaFold(tree, name=config.model.name)
    if config.model.weights is not None:
        _, state = read_weights(one_weights_file(config.model.weights), config=tree)
        model.load_state_dict(state)
    if config.finetune.freeze:
        freeze(model, config.finetune.freeze)
    if config.finetune.lora_rank:
        add_lora(model, rank=config.finetune.lora_rank, alpha=config.finetune.lora_alpha)
    return model


def build_network(config: TrainConfig, tree: Any, context: DistributedContext) -> Parallel:
    """Build the network to train under the run's plan, on its device and in training mode.

    Raises:
        WeightsError: The initial weights cannot be read or belong to another network.
        ConfigError: A pattern of parameters to freeze matches none, or the plan does not fit the network.
    """
    check_memory(config, context)
    managed = config.memory.policy is not None
    model = plain_network(config, tree)
    # A memory manager keeps parameters on the host and moves them to the device in chunks.
    if not managed:
        model.to(context.device)
    # Memory managers choose recomputation block by block, except with the policy cuda.
    model.set_checkpointing(config.memory.checkpointing and config.memory.policy in (None, "cuda"))
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
