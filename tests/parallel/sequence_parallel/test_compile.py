"""A module on parts of a sequence computes the same when it is compiled; its attention is left out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.parallel import ParallelMesh, ParallelPlan, SequenceParallel
from tests.helpers.spawn_ranks import launch


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.joint, self.output = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.joint(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.between = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([_Attention(), _Attention()])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = x + block(x) + self.between(x).relu()
        return x


def _differences() -> float:
    plain, net = _Net(), _Net()
    group = ParallelMesh(ParallelPlan(sp=2)).group("sp")
    sequence = SequenceParallel(net, group, attention=_Attention, positions=[net.positions])
    compiled, worst = torch.compile(sequence.module, backend="aot_eager"), 0.0
    for length in (6, 7, 6):
        x = torch.randn(2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        own = sequence.shard(x, 1)
        found, expected = compiled(own), plain(x)
        found.square().sum().backward()
        expected.square().sum().backward()
        part = expected[:, sequence.first : sequence.first + own.shape[1]]
        worst = max(worst, float((found - part).detach().abs().max()))
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        worst = max(worst, float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
    return worst


@pytest.mark.slow
def test_a_compiled_module_trains_as_on_one_process() -> None:
    """For sequences of several lengths, with gradients."""
    assert max(launch(_differences, 2, timeout=120)) < 1e-12
