"""Launch configurations of the Triton kernels: a table that ships, so that no first call tunes for minutes.

Sizes that only scale the grid are run-time arguments and no key of the table: a kernel is compiled per configuration
and dtype, not per sequence length.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

FALLBACK = "any"
"""Class of chips that the table knows nothing about."""


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched.

    Attributes:
        blocks: Its block sizes (``tl.constexpr`` arguments), by name.
        num_warps: Warps of a program.
        num_stages: Stages of software pipelining.
    """

    blocks: dict[str, int]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def launch(self) -> dict[str, int | bool]:
        """All of it as keyword arguments of a launch.

        Fused multiply-adds are asked for by name, because Triton's default changes after 3.9.
        """
        return {
            **self.blocks,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


def chip_class(device: torch.device) -> str:
    """Class of a GPU in the table: ``sm_80`` (A100), ``sm_90`` (H100, H200), ``sm_100`` (B200), ``rtx``, or ``any``."""
    if device.type != "cuda" or torch.version.hip is not None:
        return FALLBACK
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) in ((8, 0), (9, 0), (10, 0), (10, 3)):
        return f"sm_{major}0"
    return "rtx" if major >= 8 else FALLBACK


def launch_config(kernel: str, key: str, device: torch.device) -> LaunchConfig:
    """The tuned configuration of a kernel.

    Args:
        kernel: Its name in the table.
        key: What the best configuration depends on, such as dtype and head channels: ``bfloat16_32``. A key that
            the table lacks takes the kernel's entry ``any``.
        device: Where it runs.

    Raises:
        KeyError: The table has no entry for the kernel at all.
    """
    entries = configurations()[kernel]
    for chip in (chip_class(device), FALLBACK):
        for name in (key, FALLBACK):
            if name in entries.get(chip, {}):
                return entries[chip][name]
    raise KeyError(f"no configuration of {kernel} for {key}")


@functools.cache
def configurations() -> dict[str, dict[str, dict[str, LaunchConfig]]]:
    """The whole table: kernel, class of chips, key."""
    folder = resources.files("fastfold.kernels") / "tuned"
    table: dict[str, Any] = {}
    for file in folder.iterdir():
        if file.name.endswith(".json"):
            table |= json.loads(file.read_text(encoding="utf-8"))
    return {
        kernel: {
            chip: {key: LaunchConfig(**entry) for key, entry in entries.items()}
            for chip, entries in chips.items()
        }
        for kernel, chips in table.items()
    }
