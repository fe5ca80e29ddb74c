"""How a plan applies to the GPT of this folder: what is cut, where it is split, and where it looks along the sequence.

    parallel = parallelize(model, plan, layers=tensor_layers(plan), stages=split_stages, sequence=sequence_parallel)

The model knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from examples.gpt.gpt import GPT, Attention
from fastfold.errors import ConfigError
from fastfold.parallel import Group, ParallelMesh, ParallelPlan, SequenceParallel, ShardFn, split_blocks
from fastfold.parallel.comm.collectives import gather
from fastfold.parallel.tensor_parallel import (
    ParallelEmbedding,
    ParallelLayerNorm,
    ParallelLinear,
    Partition,
    layouts,
)


class ShardedAttention(Attention):
    """The attention of this rank's heads; the forward pass is the plain one's."""

    def __init__(self, plain: Attention, mesh: ParallelMesh) -> None:
        nn.Module.__init__(self)
        width = plain.qkv.in_features // plain.heads
        ranks = layouts(mesh)[1].features
        inputs = Partition.heads(plain.heads, width, ranks.size, 3)
        mixed = Partition.heads(plain.heads, width, ranks.size)
        self.all_heads = plain.heads
        self.heads = mixed.sizes[ranks.rank] // width
        self.qkv = cast(nn.Linear, ParallelLinear.from_plain(plain.qkv, mesh, "first", out_parts=inputs))
        self.output = cast(nn.Linear, ParallelLinear.from_plain(plain.output, mesh, "second", in_parts=mixed))

    def to_plain(self) -> Attention:
        """The attention of all heads (a collective)."""
        plain = Attention.__new__(Attention)
        nn.Module.__init__(plain)
        plain.heads = self.all_heads
        plain.qkv, plain.output = (cast(ParallelLinear, x).to_plain() for x in (self.qkv, self.output))
        return plain


def _first(linear: nn.Module, mesh: ParallelMesh) -> nn.Module:
    return ParallelLinear.from_plain(cast(nn.Linear, linear), mesh, "first")


def _second(linear: nn.Module, mesh: ParallelMesh) -> nn.Module:
    return ParallelLinear.from_plain(cast(nn.Linear, linear), mesh, "second")


def _scores(linear: nn.Module, mesh: ParallelMesh) -> nn.Module:
    """The output layer: cut like the others, its scores gathered, so that each rank has the whole vocabulary."""
    layer = ParallelLinear.from_plain(cast(nn.Linear, linear), mesh, "first")
    group, sizes = layer.after.features, layer.out_parts.sizes

    def join(_: nn.Module, __: object, scores: Tensor) -> Tensor:
        # The ranks of the group go on with the same loss.
        return gather(scores, -1, group, sizes, same_after=True)

    layer.register_forward_hook(join)
    return layer


def tensor_layers(plan: ParallelPlan) -> dict[str, ShardFn]:
    """What of a GPT tensor parallelism replaces.

    In 2d and 2.5d a rank works on the rows ``parallel.rows`` of a batch and computes their loss.

    Raises:
        ConfigError: In 3d the output layer's rows are others than the input's, which this model's loss does not expect.
    """
    if plan.tp_mode == "3d":
        raise ConfigError("the example's loss goes with tp_mode 1d, 2d and 2.5d")
    found: dict[str, ShardFn] = {
        "tokens": lambda table, mesh: ParallelEmbedding.from_plain(cast(nn.Embedding, table), mesh),
        "blocks.*.attention": lambda plain, mesh: ShardedAttention(cast(Attention, plain), mesh),
        "blocks.*.mlp.up": _first,
        "blocks.*.mlp.down": _second,
        "head": _scores,
    }
    if plan.tp_mode != "1d":
        found["positions"] = found["tokens"]
        for name in ("norm", "blocks.*.norm_attention", "blocks.*.norm_mlp"):
            found[name] = lambda norm, mesh: ParallelLayerNorm.from_plain(cast(nn.LayerNorm, norm), mesh)
    return found


def sequence_parallel(model: nn.Module, group: Group) -> SequenceParallel:
    """Ring attention in a GPT, and the positions of this rank's part."""
    assert isinstance(model, GPT)
    return SequenceParallel(model, group, attention=Attention, positions=[model.positions])


class FirstStage(nn.Module):
    """Embeddings and some blocks: ``tokens [*, T]`` to ``x [*, T, width]``."""

    def __init__(self, model: GPT, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.positions, self.blocks = model.tokens, model.positions, nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        """The stream after these blocks."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return x


class MiddleStage(nn.Module):
    """Some blocks: ``x [*, T, width]`` to the same shape."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after these blocks."""
        for block in self.blocks:
            x = block(x)
        return x


class LastStage(MiddleStage):
    """Some blocks and the output layer: ``x [*, T, width]`` to scores ``[*, T, vocabulary]``."""

    def __init__(self, model: GPT, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next token."""
        return self.head(self.norm(super().forward(x)))


def split_stages(model: nn.Module, count: int) -> list[nn.Module]:
    """A GPT as ``count`` stages with equally many blocks, the first ones one more."""
    assert isinstance(model, GPT)
    parts = split_blocks(list(model.blocks), count)
    middle = [MiddleStage(part) for part in parts[1:-1]]
    return [FirstStage(model, parts[0]), *middle, LastStage(model, parts[-1])]
