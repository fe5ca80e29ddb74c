"""Train a model of your own on several processes, with one call and without a change to the model.

    torchrun --nproc-per-node 2 examples/parallelize_my_model.py               # ZeRO: optimizer states are sharded
    torchrun --nproc-per-node 2 examples/parallelize_my_model.py --plan tp=2   # tensor parallelism: layers are cut

Each process also trains the plain model by itself, so that the last line can say how far the two are apart.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastfold.parallel import parallelize
from fastfold.parallel.tensor_parallel import ParallelMLP

PLANS = {"dp=2": {"dp": 2, "zero": 1}, "tp=2": {"tp": 2}}


class Block(nn.Module):
    """A normalised perceptron, added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x [batch, channels]`` to the same shape."""
        return x + self.mlp(self.norm(x))


class MyModel(nn.Sequential):
    """Three blocks; single-device code that knows nothing of processes."""

    def __init__(self, channels: int = 32, blocks: int = 3) -> None:
        super().__init__(*(Block(channels) for _ in range(blocks)))


def main() -> None:
    """Three steps under the plan and three on this process alone, and the largest difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", choices=PLANS, default="dp=2")
    plan = PLANS[parser.parse_args().plan]
    if "RANK" not in os.environ:
        parser.error("start two processes: torchrun --nproc-per-node 2 examples/parallelize_my_model.py")
    dist.init_process_group("gloo")  # torchrun started two of these
    torch.manual_seed(0)
    plain = MyModel().double()
    x, target = torch.randn(2, 5, 32, dtype=torch.float64)  # a batch that two processes cannot share evenly

    # Which layers tensor parallelism cuts, by pattern of their names; data parallelism needs no such list.
    layers = {"*.mlp": ParallelMLP.from_plain} if "tp" in plan else None
    parallel = parallelize(copy.deepcopy(plain), plan, layers=layers)
    optimizer = parallel.optimizer(lambda named: torch.optim.AdamW(named.values(), lr=1e-2))
    rows = parallel.rows(len(x))  # this process's part of the batch
    share = parallel.loss_share(rows.stop - rows.start)
    for _ in range(3):
        loss = (parallel.module(x[rows]) - target[rows]).square().mean() * share
        optimizer.zero_grad()
        loss.backward()
        parallel.reduce_gradients()
        optimizer.step()

    alone = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(3):
        loss = (plain(x) - target).square().mean()
        alone.zero_grad()
        loss.backward()
        alone.step()

    state = parallel.state_dict()  # the plain model's names and shapes, whatever the plan
    worst = max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())
    held = sum(p.numel() for p in parallel.module.parameters())
    if dist.get_rank() == 0:
        print(
            f"{parallel.plan}: {held:,} of {sum(p.numel() for p in plain.parameters()):,} parameters per process"
        )
        print(f"after three steps the weights differ from one process's by {worst:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
