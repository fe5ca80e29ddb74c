"""Use one operator of ``fastfold.kernels`` in a module of your own, without the rest of the package.

    python examples/use_one_kernel.py

Attention with a bias for each pair of positions, a mask of keys, and an output gate takes six lines of PyTorch and
memory for all scores, ``[rows, heads, N, N]``. ``fastfold.kernels.attention`` computes the same in blocks: forward and
backward, with Triton on a GPU and with PyTorch elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastfold import kernels

ROWS, N, HEADS, CHANNELS = 8, 48, 4, 16


def plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, gate: Tensor) -> Tensor:
    """What the operator computes, written with all scores in memory."""
    # [rows, N, heads, c] -> [rows, heads, N, N]
    scores = torch.einsum("rqhc,rkhc->rhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores + bias
    scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
    weights = scores.softmax(-1)
    return torch.einsum("rhqk,rkhc->rqhc", weights, v) * gate.sigmoid()


class RowAttention(nn.Module):
    """Gated self-attention along the rows of ``x [rows, N, c]``, biased by ``pair [N, N, c_pair]``."""

    def __init__(self, channels: int, pair_channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.qkvg = nn.Linear(channels, 4 * channels)
        self.bias = nn.Linear(pair_channels, heads, bias=False)
        self.output = nn.Linear(channels, channels)

    def forward(self, x: Tensor, pair: Tensor, mask: Tensor) -> Tensor:
        """The update of ``x``; ``mask [rows, N]`` is 0 for positions that nobody attends to."""
        heads = self.qkvg(self.norm(x)).unflatten(-1, (4, self.heads, -1))
        q, k, v, gate = heads.unbind(-3)
        bias = self.bias(pair).permute(2, 0, 1)
        return self.output(kernels.attention(q, k, v, bias, mask, gate).flatten(-2))


def main() -> None:
    """Compare the operator with the plain definition, then train a module that uses it."""
    torch.manual_seed(0)
    q, k, v, gate = (torch.randn(ROWS, N, HEADS, CHANNELS, requires_grad=True) for _ in range(4))
    bias = torch.randn(HEADS, N, N, requires_grad=True)
    mask = (torch.rand(ROWS, N) > 0.2).float()
    inputs = {"q": q, "k": k, "v": v, "bias": bias, "gate": gate}

    found = kernels.attention(q, k, v, bias, mask, gate)
    expected = plain_attention(q, k, v, bias, mask, gate)
    print(f"output differs by {relative(found, expected):.1e}")
    gradients = torch.autograd.grad(found.square().sum(), list(inputs.values()))
    exact = torch.autograd.grad(expected.square().sum(), list(inputs.values()))
    for name, one, other in zip(inputs, gradients, exact, strict=True):
        print(f"gradient of {name} differs by {relative(one, other):.1e}")

    layer = RowAttention(channels=32, pair_channels=8, heads=4)
    x, pair, target = torch.randn(ROWS, N, 32), torch.randn(N, N, 8), torch.randn(ROWS, N, 32)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (layer(x, pair, mask) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"a module that uses it: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    main()
