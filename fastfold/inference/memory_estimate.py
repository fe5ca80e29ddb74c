"""How much memory a fold takes and what fits, so that a hopeless target is refused before hours are spent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fastfold.errors import InputError
from fastfold.evoformer.config import is_multimer

_GIB = 1024**3

# PyTorch's own buffers and the heap, and the blocks in which the operators work (16 MiB of float32, eight at once).
_FIXED = 128 << 20
_BLOCKS, _BLOCK_BYTES = 8, 16 << 20
# Bytes per row and residue: of the raw alignment, of a cluster's features, and of an extra row's features.
_RAW, _CLUSTER_FEATURES, _EXTRA_FEATURES = 12, 220, 230


def estimated_bytes(
    config: Any, residues: int, *, element_size: int, alignment_rows: int | None = None
) -> int:
    """Peak memory of one fold in bytes, parameters and the alignments themselves left out.

    Each term counts the tensors that live at once in one of the steps that can be the largest. Fitted to the peak
    resident memory of folds by networks with one block of each stack (``python -m tests.inference.measure_fold``,
    1 recycle, 2 cores): the estimate was 1.04 to 1.29 times what was measured.

    Args:
        config: Official configuration tree.
        residues: Length of the target, all chains together.
        element_size: Bytes per element of the trunk (4 for float32, 2 for bfloat16).
        alignment_rows: Rows of all alignments; None for as many as the network takes.
    """
    c = config.model.embeddings_and_evoformer
    if is_multimer(config):
        most_clusters, most_extra = c.num_msa, c.num_extra_msa
        template_channels = c.template.num_channels
    else:
        most_clusters, most_extra = config.data.eval.max_msa_clusters, config.data.common.max_extra_msa
        template_channels = c.template.template_pair_stack.triangle_attention_ending_node.value_dim
    rows = most_clusters + most_extra if alignment_rows is None else max(1, alignment_rows)
    clusters = min(rows, most_clusters)
    extra = min(rows - clusters, most_extra)
    templates = c.template.max_templates if c.template.enabled else 0
    heads = config.model.heads
    exact_copy = 0 if element_size == 4 else 4  # of what a step needs in float32

    # The running pair representation and that of the last cycle, beside everything.
    pair = 2 * element_size * c.pair_channel
    # The monomer network keeps all templates and then stacks them; the multimer network adds them up one by one.
    template_copies = min(templates, 1) * (5 if is_multimer(config) else 2 * templates + 1)
    embed_templates = element_size * template_channels * template_copies
    triangle = 3 * element_size * c.pair_channel
    structure = (4 + exact_copy) * c.pair_channel + 4 * 7 * heads.structure_module.num_head
    logits = (4 + exact_copy) * (2 * heads.distogram.num_bins + heads.predicted_aligned_error.num_bins)
    squared = residues * residues * max(embed_templates, triangle, structure, logits)

    outer = c.evoformer.outer_product_mean.num_outer_channel
    # Extra rows, their normalised form, and the two projections of the outer product.
    per_extra = 2 * element_size * (c.extra_msa_channel + outer) + 2 * exact_copy * outer + _EXTRA_FEATURES
    per_cluster = element_size * c.msa_channel + _CLUSTER_FEATURES
    return int(
        _FIXED
        + _BLOCKS * min(_BLOCK_BYTES, 4 * residues * residues * c.pair_channel)
        + residues * residues * pair
        + residues * (clusters * per_cluster + rows * _RAW)
        + max(squared, residues * extra * per_extra)
    )


def available_bytes(device: torch.device) -> int:
    """Memory in bytes that is free on a device now; for a CPU, what the system can give without swapping."""
    if device.type == "cuda":
        # What PyTorch holds from an earlier target without using it is free for the next one.
        pool = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + pool
    limits = [_system_memory(), *_group_memory()]
    return max(0, min(limits))


def _system_memory() -> int:
    """What the whole machine can give."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the control groups leave this process, as batch systems and containers set them (Linux, version 2)."""
    left = []
    try:
        path = next(line for line in own.read_text().splitlines() if line.startswith("0::"))
        folder = root / path.removeprefix("0::").strip("/")
        for group in (folder, *folder.parents):
            limit = (group / "memory.max").read_text().strip() if (group / "memory.max").is_file() else "max"
            if limit != "max":
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                # Pages of files that were read count as used, but give way.
                idle = int(statistics["file"]) - int(statistics["shmem"])
                left.append(int(limit) - int((group / "memory.current").read_text()) + idle)
    except (OSError, StopIteration, ValueError, KeyError):
        pass
    return left


def longest_that_fits(
    config: Any, budget: int, *, element_size: int, alignment_rows: int | None = None
) -> int:
    """Largest number of residues whose estimate stays within ``budget`` bytes."""
    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high + 1) // 2
        needed = estimated_bytes(config, middle, element_size=element_size, alignment_rows=alignment_rows)
        if needed <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def check_fits(
    config: Any,
    residues: int,
    device: torch.device,
    *,
    element_size: int,
    name: str,
    alignment_rows: int | None = None,
) -> None:
    """Refuse a target that cannot fit.

    Args:
        config: Official configuration tree.
        residues: Length of the target, all chains together.
        device: Where it would be folded.
        element_size: Bytes per element of the trunk.
        name: Name of the target.
        alignment_rows: Rows of all alignments; None for as many as the network takes.

    Raises:
        InputError: The estimate is over what the device has free; says what it would need and what fits.
    """

    def needed(element_size: int) -> int:
        return estimated_bytes(config, residues, element_size=element_size, alignment_rows=alignment_rows)

    free = available_bytes(device)
    if needed(element_size) <= free:
        return
    fits = longest_that_fits(config, free, element_size=element_size, alignment_rows=alignment_rows)
    remedies = ["take a device with more memory", "fold shorter pieces"]
    if element_size > 2 and needed(2) <= free:
        remedies.insert(0, "use --precision bf16")
    raise InputError(
        f"{residues:,} residues would need about {needed(element_size) / _GIB:,.0f} GiB of memory; {device.type} has "
        f"{free / _GIB:,.1f} GiB free, enough for about {fits:,} residues; " + ", or ".join(remedies),
        record=name,
    )
