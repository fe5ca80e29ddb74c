"""Linear and embedding layers whose weights are stored in words of 8 bits, for inference on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.errors import ConfigError
from fastfold.kernels.cpu.linear import join_words, max_inputs, split_into_words


@functools.cache
def adds_int8_exactly() -> bool:
    """Return True if int8 sums are exact; some processors without VNNI add in 16 bits."""
    large = torch.full((64, 256), 127, dtype=torch.int8)
    small = -large
    return bool((torch._int_mm(large, small.t()) == -127 * 127 * 256).all())


class Int8Weight(nn.Module):
    """Matrix ``[N, K]`` in words of 8 bits, with a scale for each of its N rows.

    Layers that share a matrix share this module. Two words have steps of a 32nd of their size.
    """

    words: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, words: int = 1) -> None:
        super().__init__()
        split, scale = split_into_words(weight.detach().float(), words)
        self.rows, self.dtype = len(weight), weight.dtype
        self.register_buffer("words", split)
        self.register_buffer("scale", scale)

    def matrix(self) -> Tensor:
        """Return the matrix ``[N, K]`` in its original dtype."""
        whole = join_words(self.words.float(), self.rows, 0)
        return whole.mul_(self.scale[:, None]).to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Weight:
        scale = self.scale
        super()._apply(fn, recurse)
        # If the model was cast, scales in 16 bits would change all weights.
        if self.scale.dtype != torch.float32:
            self.scale = scale.to(self.words.device)
        return self


class _Int8Layer(nn.Module):
    """Layer with a stored weight; code that reads ``weight`` gets the matrix."""

    def __init__(self, stored: Int8Weight) -> None:
        super().__init__()
        self.stored = stored

    @property
    def weight(self) -> Tensor:
        """Weight ``[N, K]`` in its original dtype, made at each use."""
        return self.stored.matrix()


class Int8Linear(_Int8Layer):
    """Linear layer ``[*, K] -> [*, N]`` that rounds its input to 8 bits, with a step for each position."""

    def __init__(self, stored: Int8Weight, bias: Tensor | None) -> None:
        super().__init__(stored)
        self.out_features, self.in_features = stored.rows, stored.words.shape[1]
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ + b``, ``[*, N]``, for ``x [*, K]``, in the dtype of ``x``.

        Raises:
            ConfigError: A gradient is needed, or the data are not on a CPU.
        """
        _check_use(x)
        rows = x.reshape(-1, self.in_features).float()
        step = rows.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).div_(127)
        rounded = (rows / step).round_().to(torch.int8)
        # A row that is not finite has a step that is not, and so has its result.
        out = torch._int_mm(rounded, self.stored.words.t()).float().mul_(step).mul_(self.stored.scale)
        if self.bias is not None:
            out.add_(self.bias)
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the sizes for the representation of the module."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class Int8Conv1D(Int8Linear):
    """Linear layer whose ``weight`` is ``[K, N]``, as that of ``Conv1D`` of the package transformers."""

    @property
    def weight(self) -> Tensor:
        """Weight ``[K, N]`` in its original dtype, made at each use."""
        return self.stored.matrix().t()


class StoredLinear(Int8Linear):
    """Linear layer that multiplies its input in the input's own dtype by the stored weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ + b``, ``[*, N]``, for ``x [*, K]``.

        Raises:
            ConfigError: A gradient is needed, or the data are not on a CPU.
        """
        _check_use(x)
        return F.linear(x, self.weight, self.bias)


class Int8Embedding(_Int8Layer):
    """Embedding ``[*] -> [*, K]`` of rows that are stored in one word of 8 bits."""

    def __init__(self, stored: Int8Weight) -> None:
        super().__init__(stored)
        self.num_embeddings, self.embedding_dim = stored.rows, stored.words.shape[1]

    def forward(self, index: Tensor) -> Tensor:
        """Return the rows ``[*, K]`` of ``index [*]``, in the original dtype."""
        stored = self.stored
        return (stored.words[index].float() * stored.scale[index].unsqueeze(-1)).to(stored.dtype)


def _check_use(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ConfigError("layers in 8 bits are for inference only; use torch.no_grad()")
    if x.device.type not in ("cpu", "meta"):
        raise ConfigError(f"layers in 8 bits run on CPUs only; the data are on {x.device.type}")


def refusal(layer: Any) -> str:
    """Return the reason why a layer cannot be stored in 8 bits; empty if it can.

    It may be an :class:`torch.nn.Linear`, an :class:`torch.nn.Embedding`, or a ``Conv1D`` of transformers.
    """
    weight = layer.weight
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed before each use"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has hooks, which its replacement would lose"
    if not weight.is_floating_point():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device.type}, and 8 bits are for CPUs"
    if not bool(torch.isfinite(weight).all()):
        return "its weight has values that are not finite"
    inputs = 0 if isinstance(layer, nn.Embedding) else weight.shape[1 if isinstance(layer, nn.Linear) else 0]
    if inputs > max_inputs():
        return f"{inputs:,} inputs; sums of more than {max_inputs():,} overflow"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "it changes its rows by max_norm"
    return ""
