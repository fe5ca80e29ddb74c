"""A small transformer of plain layers, its tensor parallel form, and a step of both to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel import (
    Layout,
    ParallelAttention,
    ParallelEmbedding,
    ParallelLayerNorm,
    ParallelMLP,
    Partition,
    layouts,
)

# Nothing divides by 2 or 4: features 21 in 7 heads, hidden 34 (in shards 17 = 9 + 8), vocabulary 13, batch 7.
FEATURES, HEADS, HIDDEN, VOCABULARY, BATCH, LENGTH = 21, 7, 34, 13, 7, 3


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1: nn.Module = nn.LayerNorm(FEATURES)
        self.norm2: nn.Module = nn.LayerNorm(FEATURES)
        self.attention: nn.Module = nn.MultiheadAttention(FEATURES, HEADS, batch_first=True)
        self.mlp: nn.Module = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES)
        )


class Transformer(nn.Module):
    """Token ids and an additive input to features; of plain layers, until :func:`make_parallel` replaces them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.Embedding(VOCABULARY, FEATURES, padding_idx=9)
        self.blocks = nn.Sequential(*[Block() for _ in range(blocks)])
        self.norm: nn.Module = nn.LayerNorm(FEATURES)

    def forward(self, ids: Tensor, noise: Tensor, row_sizes: Sequence[int] | None = None) -> Tensor:
        x = self.embedding(ids) + noise
        for block in self.blocks:
            assert isinstance(block, Block)
            y = block.norm1(x)
            own = {"row_sizes": row_sizes} if isinstance(block.attention, ParallelAttention) else {}
            future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            x = x + block.attention(y, y, y, attn_mask=future, need_weights=False, **own)[0]
            x = x + block.mlp(block.norm2(x), **own)
        return self.norm(x)


def make_plain(blocks: int) -> Transformer:
    """The same random weights on every rank, every parameter away from its neutral value."""
    torch.manual_seed(0)
    model = Transformer(blocks).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(parameter.shape[-1], 4) ** 0.5 + 0.1)
    return model


def make_parallel(plain: Transformer, mesh: ParallelMesh) -> Transformer:
    """The same model, each layer replaced by this rank's part."""
    model = copy.deepcopy(plain)
    makers: dict[type[nn.Module], Callable[..., nn.Module]] = {
        nn.Embedding: ParallelEmbedding.from_plain,
        nn.LayerNorm: ParallelLayerNorm.from_plain,
        nn.MultiheadAttention: ParallelAttention.from_plain,
        nn.Sequential: ParallelMLP.from_plain,
    }
    for owner in (model, *model.blocks):
        for name, child in list(owner.named_children()):
            if child is not model.blocks:
                setattr(owner, name, makers[type(child)](child, mesh))
    return model


def to_plain(model: Transformer) -> dict[str, Tensor]:
    """The plain model's parameters by name, gathered."""
    model = copy.deepcopy(model)
    for owner in (model, *model.blocks):
        for name, child in list(owner.named_children()):
            if hasattr(child, "to_plain"):
                setattr(owner, name, child.to_plain())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gradients(model: Transformer) -> dict[str, Tensor]:
    """The plain model's gradients by name, gathered."""
    copied = copy.deepcopy(model)
    for parameter, original in zip(copied.parameters(), model.parameters(), strict=True):
        assert original.grad is not None
        parameter.data = original.grad
    return to_plain(copied)


class Batch:
    """Token ids, an additive input and targets, the same on every rank; a rank takes its part."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        self.noise = torch.randn(BATCH, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(BATCH, LENGTH, FEATURES, generator=generator, dtype=torch.float64)

    def part(self, rows: slice) -> Batch:
        """Some of the batch."""
        found = copy.copy(self)
        found.ids, found.noise, found.targets = self.ids[rows], self.noise[rows], self.targets[rows]
        return found


def loss_of(y: Tensor, targets: Tensor) -> Tensor:
    """A sum over everything, divided by a constant: the sum of the losses of parts is the loss of the whole."""
    return ((y - targets).square() + (y * targets).sin()).sum() / 100


class Step:
    """One forward and backward pass: output, input gradient, loss."""

    def __init__(self, model: Transformer, batch: Batch, layout: Layout | None = None) -> None:
        row_sizes, ids, noise, targets = None, batch.ids, batch.noise, batch.targets
        if layout is not None:
            parts = Partition.even(FEATURES, layout.features.size)
            ids, noise, targets = layout.take(ids), layout.take(noise, parts), layout.take(targets, parts)
            row_sizes = layout.row_sizes(batch.ids.shape[0])
        model.zero_grad()
        noise = noise.detach().clone().requires_grad_()
        self.output = model(ids, noise, row_sizes)
        self.loss = loss_of(self.output, targets)
        self.loss.backward()
        assert noise.grad is not None
        self.input_gradient = noise.grad


def outer(mesh: ParallelMesh) -> Layout:
    """The layout of the model's input and output."""
    return layouts(mesh)[0]
