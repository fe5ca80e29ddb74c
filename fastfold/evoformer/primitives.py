"""Linear layers and layer norms with AlphaFold's initialisation (supplement, section 1.11.4), and dropout (1.11.6)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold import kernels
from fastfold.evoformer.execution import check_part, current_call, is_training

Init = Literal["default", "relu", "glorot", "gating", "final"]

# Standard deviation of a unit normal truncated at two; divides the requested standard deviation.
_TRUNCATED_STD = 0.87962566103423978


class Linear(nn.Linear):
    """Linear layer ``[*, c_in] -> [*, c_out]``, initialised by supplement section 1.11.4.

    Args:
        c_in: Input channels.
        c_out: Output channels.
        bias: True to add a bias.
        init: ``default`` (LeCun), ``relu`` (He), ``glorot`` (uniform, attention projections), ``gating``
            (weights zero, bias one: the gate starts open), ``final`` (zero: a residual branch starts silent).
        heads: For ``glorot``: the number of heads that the outputs are split into. Haiku counts a tensor
            ``[c_in, heads, c]`` as having fan-in ``c_in * heads`` and fan-out ``c_in * c``.
    """

    def __init__(
        self, c_in: int, c_out: int, *, bias: bool = True, init: Init = "default", heads: int = 1
    ) -> None:
        self.init, self.heads = init, heads
        super().__init__(c_in, c_out, bias=bias)

    def reset_parameters(self) -> None:
        """Draw weight and bias by ``init``."""
        if self.weight.is_meta:
            return  # meta parameters hold no values; drawing them would slow the construction down
        with torch.no_grad():
            if self.init in ("default", "relu"):
                std = math.sqrt((2.0 if self.init == "relu" else 1.0) / self.in_features) / _TRUNCATED_STD
                nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
            elif self.init == "glorot":
                fan_sum = self.in_features * (self.heads + self.out_features // self.heads)
                bound = math.sqrt(6.0 / fan_sum)
                nn.init.uniform_(self.weight, -bound, bound)
            else:
                nn.init.zeros_(self.weight)
            if self.bias is not None:
                nn.init.constant_(self.bias, 1.0 if self.init == "gating" else 0.0)


class LayerNorm(nn.Module):
    """Layer norm over the last axis, statistics in float32, epsilon 1e-5."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [*, channels]``; the result has the same dtype."""
        return kernels.layer_norm(x, self.weight, self.bias)


def one_hot_linear(linear: Linear, index: Tensor, offset: int = 0) -> Tensor:
    """Return a linear layer's weight times one-hot vectors, as a lookup without the bias, ``[*, c_out]``.

    ``index [*]`` is the int64 class of each position, and ``offset`` the input channel of class 0.

    Raises:
        ConfigError: The layer would do more than its parameters say.
    """
    check_part(linear, "a linear layer of one-hot vectors")
    return F.embedding(index + offset, linear.weight.t())


class SharedDropout(nn.Module):
    """Dropout factors shared by all rows or all columns of a residual update.

    Args:
        rate: Probability that a channel is dropped.
        shared_dim: Axis along which one mask is shared: -3 for AlphaFold's ``DropoutRowwise``, -2 for
            ``DropoutColumnwise``.
    """

    def __init__(self, rate: float, shared_dim: int) -> None:
        super().__init__()
        self.rate, self.shared_dim = rate, shared_dim

    def forward(self, x: Tensor) -> Tensor | None:
        """Draw factors for ``x [*, rows, columns, c]``, of size one along the shared axis; None without dropout."""
        if self.rate == 0.0 or not is_training(self):
            return None
        shape = list(x.shape)
        shape[self.shared_dim] = 1
        return _factors(torch.empty(shape, dtype=x.dtype, device=x.device), self.rate)

    def extra_repr(self) -> str:
        """Return the arguments for the representation of the module."""
        return f"rate={self.rate}, shared_dim={self.shared_dim}"


def dropout(x: Tensor, rate: float, *, training: bool) -> Tensor:
    """Return PyTorch's dropout of ``x [*]``, with the random numbers of the call."""
    if not training or rate == 0.0:
        return x
    call = current_call()
    if call is None or call.generator is None:
        return F.dropout(x, rate)
    return x * _factors(torch.empty_like(x), rate)


def _factors(out: Tensor, rate: float) -> Tensor:
    """Fill a tensor with dropout factors, zero or ``1 / keep rate``."""
    call, keep = current_call(), 1.0 - rate
    return out.bernoulli_(keep, generator=None if call is None else call.generator).div_(keep)
