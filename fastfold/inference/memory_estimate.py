"""How much memory a fold takes and what fits, so that a hopeless target is refused before hours are spent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fastfold.errors import InputError
from fastfold.evoformer.config import is_multimer

# Pair tensors alive at once in a triangle multiplication: the recycled one, the running one, the update and the
# blocks in work.
_PAIR_COPIES = 4.5
_GIB = 1024**3


def estimated_bytes(
    config: Any, residues: int, *, element_size: int, alignment_rows: int | None = None
) -> int:
    """Peak memory of one fold in bytes, parameters left out.

    Args:
        config: Official configuration tree.
        residues: Length of the target, all chains together.
        element_size: Bytes per element of the trunk (4 for float32, 2 for bfloat16).
        alignment_rows: Rows of all alignments; None for as many as the network takes.
    """
    c = config.model.embeddings_and_evoformer
    if is_multimer(config):
        clusters, extra = c.num_msa, c.num_extra_msa
        template_channels = c.template.num_channels
    else:
        clusters, extra = config.data.eval.max_msa_clusters, config.data.common.max_extra_msa
        template_channels = c.template.template_pair_stack.triangle_attention_ending_node.value_dim
    templates = template_channels * c.template.max_templates if c.template.enabled else 0
    heads = config.model.heads
    pair = element_size * (_PAIR_COPIES * c.pair_channel + templates)
    logits = 4 * (2 * heads.distogram.num_bins + heads.predicted_aligned_error.num_bins)
    structure = 4 * (c.pair_channel + 4 * heads.structure_module.num_head)
    alignment = element_size * 3 * max(clusters * c.msa_channel, extra * c.extra_msa_channel)
    return int(residues * residues * (pair + max(logits, structure)) + residues * alignment)


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


def _group_memory() -> list[int]:
    """What the control groups of this process leave it, as batch systems and containers set them (Linux, version 2)."""
    left = []
    try:
        own = next(
            line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
        )
        folder = Path("/sys/fs/cgroup") / own.removeprefix("0::").strip("/")
        for group in (folder, *folder.parents):
            if (group / "memory.max").is_file() and (
                limit := (group / "memory.max").read_text().strip()
            ) != "max":
                # Pages of files that were read count as used, but give way.
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(statistics["file"])
                left.append(int(limit) - used)
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
