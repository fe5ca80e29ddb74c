"""A training step of the GPT of this folder as something to be planned.

    best_plans(gpt_workload(GPTConfig(50257, 1024, 24, 16, 1024), samples=512), gpus=64, gpu="h100")

tries data, pipeline, sequence and tensor parallelism in one and two dimensions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from examples.gpt.gpt import GPT, GPTConfig, next_token_loss
from examples.gpt.parallel import sequence_parallel, tensor_layers
from fastfold.parallel import ParallelMesh, ParallelPlan, parallelize
from fastfold.parallel.planner.workload import Repeat, Workload, standard_layouts


class Step(nn.Module):
    """One micro-batch of whole sequences, of which this rank takes its part."""

    def __init__(self, config: GPTConfig, mesh: ParallelMesh, rows: int) -> None:
        super().__init__()
        layers = tensor_layers(mesh.plan) if mesh.plan.tp > 1 else None
        self.parallel = parallelize(GPT(config), mesh, layers=layers, sequence=sequence_parallel)
        self.model = self.parallel.module
        self.shape = (rows, config.context)

    def forward(self) -> Tensor:
        """The loss, in bfloat16 autocast."""
        tokens = torch.zeros(self.shape, dtype=torch.int64)[self.parallel.rows(self.shape[0])]
        if self.parallel.sequence is not None:
            tokens = self.parallel.sequence.shard(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(tokens)
        return next_token_loss(logits.float(), tokens)


def gpt_workload(
    config: GPTConfig, *, samples: int, micro: int = 1, tp_modes: tuple[str, ...] = ("1d", "2d", "2.5d")
) -> Workload:
    """One step on ``samples`` sequences of ``config.context`` tokens.

    Args:
        config: Sizes. Output layer and embedding are not tied, as most plans want it.
        samples: Sequences of a step.
        micro: Sequences that a rank runs at once.
        tp_modes: Of tensor parallelism.
    """
    one_layer = replace(config, layers=1, tied=False)

    def rows(layout: ParallelPlan) -> int:
        # In two dimensions the rows of a batch are split over the grid's columns and its depth.
        return micro * (1 if layout.tp_mode == "1d" else layout.tp_grid[0] * layout.tp_grid[1])

    return Workload(
        name="gpt",
        build=lambda mesh: Step(one_layer, mesh, rows(mesh.plan)),
        loss=lambda step: step(),
        samples=samples,
        stacks={"model.blocks.0": Repeat(config.layers)},
        layouts=standard_layouts(tp=config.heads, sp=config.context // 128, tp_modes=tp_modes),
        rows=rows,
        stages=config.layers,
        description=f"{config.layers} layers of width {config.width}, {config.context} tokens, bf16, batch {samples}",
    )
