"""Time of the steps of a fold, from floating-point operations, a measured rate, and overheads.

A step in blocks has an overhead for every block: its launches, and repeated computations. Triangle multiplication has
one for every group of channels, because the pair is normalised again, and one for offloaded bytes. The four numbers
are measured on the device in less than a second (:func:`measure_costs`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.config import is_multimer
from fastfold.inference.planning.layer_costs import MULTIPLICATION, LayerCost, evoformer_costs, pair_costs
from fastfold.kernels.ops.transition.op import transition_flops
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
from fastfold.memory.block_sizes import measure_blocks

MULTIPLICATIONS = 2  #: Triangle multiplications of a block, also of a template block

_PAIR_TRAFFIC = {
    "embedding": 6,
    "outer product mean": 2,
    # Twice queries, keys, values and gate (written and read), the output, and the pair; two biases; a transition.
    "triangle attention": 2 * (8 + 2 + 2) + 2 + 2,
    # Of each: the pair twice and its result, both factors (written and read) and the product (written and read).
    "triangle multiplication": 3 + 4 + 2,
}
"""Reads and writes of the pair in the device's memory by a step of one block."""


@dataclass(frozen=True)
class Products:
    """Time of steps with triangle multiplications, in seconds."""

    work: float  #: All in one group of channels
    per_group: float  #: Each further group
    count: int  #: Number of multiplications
    copies: float  #: Copies of one product to the host and back, which overlap the contraction
    contraction: float  #: Contraction of one product
    latency: float  #: Added to each multiplication with copies
    disk: float  #: Factor by which copies to a disk are slower

    def seconds(self, groups: int, *, away: float = 0.0, on_disk: float = 0.0) -> float:
        """Return a step's seconds with shares of each product ``away``, and of them ``on_disk``."""
        seconds = self.work + self.per_group * (groups - 1)
        if not away:
            return seconds
        copies = self.copies * (away + (self.disk - 1.0) * on_disk)
        # Copies overlap the contraction, so the longer of the two counts.
        return seconds + self.count * (max(0.0, copies - self.contraction) + self.latency)


@dataclass(frozen=True)
class StepTimes:
    """Times of one pass of a network over one target, in seconds."""

    work: dict[str, float]  #: Time of each step that runs in blocks of rows, in one block
    per_block: dict[str, float]  #: Time that each block adds
    trunk: Products  #: Triangle multiplications of the trunk
    templates: Products  #: Triangle multiplications of all templates, once
    unit_copy: float  #: Time of a copy of the pair to the host, or back
    per_exchange: float = 0.0  #: Time that each further block of an exchange between ranks adds


@dataclass(frozen=True)
class Costs:
    """Costs measured on a device."""

    rate: float = 1e11  #: Floating-point operations per second of the operators
    per_block: float = 2e-4  #: Seconds that a block of rows adds to a step
    #: Seconds that a further group of channels adds to a triangle multiplication, per pair of residues
    per_pair: float = 1e-8
    bandwidth: float = 1e10  #: Bytes per second to the host and back
    disk: float = 2e9  #: Bytes per second to a disk and back
    #: Bytes per second of the device's memory; infinite if ``rate`` includes its traffic
    memory: float = float("inf")

    def of(self, config: ConfigDict, fold: Any) -> StepTimes:
        """Return the times of the steps of a :class:`~fastfold.inference.planning.memory_model.Fold`."""
        c = config.model.embeddings_and_evoformer
        n, pairs, c_z = fold.residues, fold.residues**2, c.pair_channel
        blocks, extra_blocks = c.evoformer_num_block, c.extra_msa_stack_num_block
        both = blocks + extra_blocks
        sizes = fold.layer_sizes(fold.clusters + fold.templates, c.msa_channel, c_z)
        layers = evoformer_costs(c.evoformer, sizes)
        in_block = _flops_by_step(layers)
        sizes = fold.layer_sizes(fold.extra, c.extra_msa_channel, c_z)
        in_extra = _flops_by_step(evoformer_costs(c.evoformer, sizes, global_column=True))
        steps = Counter(one.step for one in layers)
        del steps[MULTIPLICATION]
        structure = config.model.heads.structure_module
        points = structure.num_layer * pairs * (structure.num_head * (4 * c_z + 400) + 8 * c_z)
        work = {
            "embedding": 20.0 * pairs * c_z,
            **{name: blocks * in_block[name] + extra_blocks * in_extra[name] for name in steps},
            "structure module": float(points),
            "heads": 2.0 * pairs * c_z * 64,
        }
        runs = {
            "embedding": 1,
            **{name: count * both for name, count in steps.items()},
            "structure module": structure.num_layer,
            "heads": 2,
        }
        c_t = template_channels(config)
        sizes = fold.layer_sizes(fold.templates, c_t, c_t)
        in_template = _flops_by_step(pair_costs(c.template.template_pair_stack, sizes))
        template_blocks = c.template.template_pair_stack.num_block if c.template.enabled else 0
        template_blocks *= fold.templates

        # Each rank computes its share.
        rate, own_pairs = self.rate * fold.ranks, fold.pairs
        one_pair = own_pairs * c_z * fold.element_size / self.memory
        moved = {
            name: one_pair * traffic * (1 if name == "embedding" else both)
            for name, traffic in _PAIR_TRAFFIC.items()
        }

        def products(count: int, channels: int, work: float) -> Products:
            multiply = 2 * n**3 * channels
            traffic = _PAIR_TRAFFIC["triangle multiplication"] * own_pairs * channels * fold.element_size
            return Products(
                count * max(work / rate, MULTIPLICATIONS * traffic / self.memory),
                count * MULTIPLICATIONS * own_pairs * self.per_pair,
                count * MULTIPLICATIONS,
                2 * own_pairs * channels * fold.element_size / self.bandwidth,
                multiply / rate,
                2 * self.per_block,
                self.bandwidth / self.disk,
            )

        return StepTimes(
            {name: max(flops / rate, moved.get(name, 0.0)) for name, flops in work.items()},
            {name: count * self.per_block for name, count in runs.items()},
            products(both, c_z, in_block[MULTIPLICATION]),
            products(template_blocks, c_t, sum(in_template.values())),
            own_pairs * c_z * fold.element_size / self.bandwidth,
            4 * both * self.per_block if fold.ranks > 1 else 0.0,
        )


def template_channels(config: ConfigDict) -> int:
    """Return the channels of a network's template blocks."""
    template = config.model.embeddings_and_evoformer.template
    if is_multimer(config):
        return int(template.num_channels)
    return int(template.template_pair_stack.triangle_attention_ending_node.value_dim)


def _flops_by_step(layers: Sequence[LayerCost]) -> Mapping[str, float]:
    flops: defaultdict[str, float] = defaultdict(float)
    for one in layers:
        flops[one.step] += one.flops
    return flops


def measure_costs(device: torch.device, dtype: torch.dtype, *, length: int | None = None) -> Costs:
    """Measure the costs on a device with the dtype of the trunk, on 64 residues, 256 on a GPU, or ``length``."""
    n = length or (64 if device.type == "cpu" else 256)
    c = 64

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()

    z = torch.zeros(n, n, c, device=device, dtype=dtype)
    mask = torch.ones(n, n, device=device, dtype=dtype)
    transition = _parameters(z, (c,), (c,), (4 * c, c), (4 * c,), (c, 4 * c), (c,))
    sides = _parameters(z, (2 * c, c), (2 * c,), (2 * c, c), (2 * c,))
    rest = _parameters(z, (c, c), (c,), (c, c), (c,))
    multiplication = kernels.TriangleParams(*transition[:2], *sides, *transition[:2], *rest)

    def rows(blocks: int) -> None:
        for part in z.chunk(blocks):
            kernels.transition(part, kernels.TransitionParams(*transition), residual=part, out=part)

    def groups(count: int) -> None:
        plan = ContractionPlan(c // count)
        kernels.triangle_multiplication(z, mask, multiplication, outgoing=True, residual=z, out=z, plan=plan)

    with torch.inference_mode():
        blocks = measure_blocks(rows, (1, n // 4), synchronize=wait)
        contraction = measure_blocks(groups, (1, 8), synchronize=wait)
    return Costs(
        rate=transition_flops(n * n, c, 4 * c) / max(blocks.work, 1e-9),
        per_block=blocks.per_block,
        per_pair=contraction.per_block / (n * n),
        bandwidth=_bandwidth(z, wait),
    )


def _parameters(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [like.new_ones(shape) * 0.01 for shape in shapes]


def _bandwidth(like: Tensor, wait: Callable[[], None]) -> float:
    size = 1 << (24 if like.is_cuda else 20)
    waiting = torch.empty(size, dtype=torch.uint8, pin_memory=like.is_cuda)
    here = torch.zeros(size, dtype=torch.uint8, device=like.device)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        here.copy_(waiting, non_blocking=True)
        wait()
        best = min(best, time.perf_counter() - start)
    return size / max(best, 1e-9)
