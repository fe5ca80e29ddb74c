"""Estimate time and traffic of a planned fold on GPUs that are not available, without measurements.

An operator takes the longer of its operations over a share of the data sheet's rate, and its bytes over a share of the
bandwidth. Copies to the host overlap the contractions; messages are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastfold.evoformer.config import is_multimer
from fastfold.inference.planning.memory_model import Fold, template_copies
from fastfold.inference.planning.planner import FoldPlan
from fastfold.inference.planning.time_model import Costs
from fastfold.memory.offload import kept_rows
from fastfold.parallel.axial.matmul import choose_contraction
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.cost_model import exchange_seconds
from fastfold.parallel.planner.hardware import Rates

LAUNCHES = 20  #: Kernels per block of rows, on average over the steps
DISK = 5e9  #: Default bandwidth of the disk in bytes per second: an NVMe disk of PCIe Gen4, a part of 7 GB/s
_MESSAGES = 24
# Messages of one block: gathers, reshards in four blocks of channels, blocks of two products.


def fold_costs(rates: Rates, element_size: int) -> Costs:
    """Estimate the costs of candidates on a GPU from its rates and the bytes per element of the trunk."""
    launch = rates.assumptions.launch_seconds
    return Costs(
        rate=rates.matrix["bfloat16" if element_size == 2 else "float32"],
        per_block=LAUNCHES * launch,
        per_pair=128 * element_size / rates.bandwidth,  # each group reads the pair again
        bandwidth=rates.host_link,
        disk=DISK,
        memory=rates.bandwidth,
    )


@dataclass(frozen=True)
class FoldTime:
    """Estimated seconds of one fold over all passes, of operators and copies, and of waiting for messages.

    ``copied`` are bytes between each GPU and the host or the disk, both ways, and ``sent`` those to other GPUs.
    """

    computing: float
    sending: float
    copied: int
    sent: float

    @property
    def seconds(self) -> float:
        """Total seconds of the fold."""
        return self.computing + self.sending


def fold_time(config: Any, fold: Fold, plan: FoldPlan, rates: Rates, passes: int) -> FoldTime:
    """Estimate time and traffic of a fold by its plan, without aligned errors and messages of templates."""
    c = config.model.embeddings_and_evoformer
    sending = sent = 0.0
    if fold.ranks > 1:
        layout = ParallelPlan(dap=fold.ranks)
        for blocks, rows, channels in (
            (c.evoformer_num_block, fold.clusters + fold.templates, c.msa_channel),
            (c.extra_msa_stack_num_block, fold.extra, c.extra_msa_channel),
        ):
            elements = inference_elements(fold.ranks, fold.residues, rows, c_m=channels, c_z=c.pair_channel)
            own = elements * fold.element_size
            one = exchange_seconds(Communication("all_gather", "dap", fold.ranks, own), layout, rates)
            sending += blocks * (one + _MESSAGES * rates.assumptions.latency_seconds)
            sent += blocks * own
    copied = copied_bytes(config, fold, plan)
    return FoldTime(passes * plan.chunks.seconds, passes * sending, passes * copied, passes * sent)


def inference_elements(ranks: int, residues: int, sequences: int, *, c_m: int = 256, c_z: int = 128) -> float:
    """Compute the elements that a rank sends in a block's forward pass without gradients.

    The result is the average over the ranks. It counts gathers of three biases, the left projection of the outer
    product mean, four reshards, and both triangle products in the cheaper way
    (:func:`fastfold.parallel.axial.matmul.choose_contraction`).

    ``residues`` is N, ``sequences`` are rows of the MSA, and the pair's channels are those of the triangle products,
    too. Row attention has eight heads, triangle attention four.
    """
    n, area = residues, residues * residues
    way = choose_contraction("auto", n, n, n, c_z, ranks)
    products = 2 * c_z * area * (3 / ranks if way == "channels" else 1)
    gathered = (8 + 2 * 4) * area + 32 * sequences * n
    resharded = 2 * (c_z * area + c_m * sequences * n) / ranks
    return (ranks - 1) / ranks * (gathered + resharded + products)


def copied_bytes(config: Any, fold: Fold, plan: FoldPlan) -> int:
    """Return the bytes that one pass copies between a device and host or disk, both ways together."""
    c = config.model.embeddings_and_evoformer
    stack = c.template.template_pair_stack if c.template.enabled else None
    n, e, own = fold.residues, fold.element_size, fold.own

    def product(channels: int, kept: float) -> int:
        away = (n - kept_rows(n, kept)) * own + (own - kept_rows(own, kept)) * n
        return away * channels * e

    chosen = plan.chunks.chosen
    kept = chosen["triangle multiplication"].settings["kept"]
    hidden = c.evoformer.triangle_multiplication_outgoing.num_intermediate_channel
    blocks = c.evoformer_num_block + c.extra_msa_stack_num_block
    copied = 2 * blocks * product(hidden, kept)
    embedding = chosen.get("templates")
    if embedding is None or stack is None:
        return copied
    multimer = is_multimer(config)
    channels = c.template.num_channels if multimer else stack.triangle_attention_ending_node.value_dim
    times = fold.templates * (1 if embedding.size or fold.templates == 1 else 2)
    copied += 2 * times * stack.num_block * product(channels, embedding.settings["product"])
    away = (own - kept_rows(own, embedding.settings["pair"])) * n * c.pair_channel * e
    return copied + template_copies(fold.templates, multimer=multimer) * away
