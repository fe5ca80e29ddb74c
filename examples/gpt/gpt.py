"""A small GPT-2 style language model in plain PyTorch, to show what works on any ``nn.Module``.

Single-device code from top to bottom: memory placement (``fastfold.memory``) and parallel layouts
(``fastfold.parallel``) are applied from outside. The network is that of Radford et al. 2019, "Language Models are
Unsupervised Multitask Learners": pre-normalised blocks, learned positions, the output layer tied to the embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a :class:`GPT`.

    Args:
        vocabulary: Number of tokens.
        context: Longest sequence.
        layers: Number of blocks.
        heads: Attention heads per block; divides ``width``.
        width: Channels of the residual stream.
        tied: The output layer uses the embedding's matrix.
        checkpointing: ``"none"`` keeps all activations; ``"block"`` recomputes each block in the backward pass.
    """

    vocabulary: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 64
    tied: bool = True
    checkpointing: str = "none"


class Attention(nn.Module):
    """Causal self-attention. ``x: [*, T, width]`` to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """One token sees itself and those before it."""
        # [*, T, 3 * width] -> 3 x [*, heads, T, width / heads]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(-3, -2).flatten(-2))


class MLP(nn.Module):
    """Two layers with a hidden width of four times the stream. ``x: [*, width]`` to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Acts on each token alone."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the stream. ``x: [*, T, width]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after this block."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Predicts the next token.

    Args:
        config: Sizes.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialize)
        if config.tied:
            self.head.weight = self.tokens.weight

    def _initialize(self, module: nn.Module) -> None:
        """Normal weights; those that add to the stream are smaller the more blocks there are."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Attention | MLP):
            last = module.output if isinstance(module, Attention) else module.down
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token.

        Args:
            tokens: int64 ``[*, T]``, ``T`` at most ``context``.

        Returns:
            Logits ``[*, T, vocabulary]``.
        """
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            if self.config.checkpointing == "block" and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it.

    Args:
        logits: ``[*, T, vocabulary]`` from :class:`GPT`.
        tokens: int64 ``[*, T]``, the tokens that went in.
    """
    return F.cross_entropy(logits[..., :-1, :].flatten(0, -2), tokens[..., 1:].flatten())
