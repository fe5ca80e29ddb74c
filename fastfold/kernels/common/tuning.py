"""Launch configurations of the Triton kernels, in a table that ships, so that no first call tunes for minutes.

A kernel is compiled per configuration and dtype, not per sequence length: sizes that only scale the grid are run-time
arguments and not keys of the table. An entry is timed if it names a GPU (``timed_on``); all others were chosen by the
registers and shared memory of their machine code, by the rules in ``benchmarks/results/choices.md``.
``python benchmarks/kernels/run.py --tune`` writes timed entries of the GPU that it runs on.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch

from fastfold.errors import ConfigError
from fastfold.utils.foreign_text import package_json

TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Triton's names of the kernels' dtypes."""

FLOAT32_VARIABLE = "FASTFOLD_FLOAT32_PRODUCTS"
"""Environment variable for the arithmetic of float32 products in kernels."""

TF32X3 = "tf32x3"
"""Arithmetic with three products of TF32 on tensor cores; each factor is a sum of two numbers of TF32."""

FALLBACK = "any"  #: Class of all chips without entries of their own


@dataclass(frozen=True)
class LaunchConfig:
    """Launch configuration of a kernel."""

    blocks: dict[str, int]  #: Block sizes (``tl.constexpr`` arguments) by name
    num_warps: int = 4  #: Number of warps of a program
    num_stages: int = 2  #: Number of stages of software pipelining
    #: Arithmetic of exact float32 products: ``ieee``, or :data:`TF32X3`, whose entries have their own keys
    float32: str = "ieee"
    #: GPU on which this configuration was the fastest, or None if it was not timed
    timed_on: str | None = field(default=None, compare=False)

    @property
    def launch(self) -> dict[str, int | bool]:
        """Keyword arguments of a launch."""
        # Fused multiply-adds are requested by name, because Triton's default changes after 3.9.
        return {
            **self.blocks,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


def chip_class(device: torch.device) -> str:
    """Return the name of a class of GPUs that share their entries in the table."""
    # ``sm_80`` is A100, ``sm_90`` H100 and H200, ``sm_100`` B200; ``rtx`` or ``any`` are all others.
    if device.type != "cuda" or torch.version.hip is not None:
        return FALLBACK
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) in ((8, 0), (9, 0), (10, 0), (10, 3)):
        return f"sm_{major}0"
    return "rtx" if major >= 8 else FALLBACK


def float32_products(device: torch.device) -> str:
    """Return the arithmetic of kernels for float32 products that PyTorch's setting wants exact (``highest``).

    ``tf32x3`` is for tensor cores with TF32: its error is that of float32 products, in fewer instructions. Only
    kernels with an entry for it in the table use it. ``ieee``, fused multiply-adds of float32, is for all other chips,
    or if :data:`FLOAT32_VARIABLE` says so.

    Raises:
        ConfigError: The variable has another value, or asks a GPU without TF32 for ``tf32x3``.
    """
    name = os.environ.get(FLOAT32_VARIABLE) or "auto"
    if name not in ("auto", TF32X3, "ieee"):
        raise ConfigError(f"{FLOAT32_VARIABLE}: expected auto, {TF32X3} or ieee, found {name!r}")
    chip = chip_class(device)
    if name == "auto":
        return "ieee" if chip == FALLBACK else TF32X3
    if name == TF32X3 and chip == FALLBACK and device.type == "cuda":
        raise ConfigError(f"{FLOAT32_VARIABLE}={name}: this GPU does not support TF32; unset the variable")
    return name


def launch_config(kernel: str, key: str, device: torch.device) -> LaunchConfig:
    """Return the configuration of a kernel from the table.

    The key has the properties that the best configuration depends on, such as dtype and head channels: ``bf16_32``. A
    missing key takes the entry without ``_tf32x3`` at its end, or else the kernel's entry ``any``.

    Raises:
        KeyError: The table has no entry for the kernel at all.
    """
    entries = configurations()[kernel]
    for chip in (chip_class(device), FALLBACK):
        for name in (key, key.removesuffix(f"_{TF32X3}"), FALLBACK):
            if name in entries.get(chip, {}):
                return entries[chip][name]
    raise KeyError(f"no configuration of {kernel} for {key}")


@functools.cache
def configurations() -> dict[str, dict[str, dict[str, LaunchConfig]]]:
    """Read the whole table: kernel, class of chips, key."""
    folder = resources.files("fastfold.kernels") / "tuned"
    table: dict[str, Any] = {}
    for file in folder.iterdir():
        if file.name.endswith(".json"):
            table |= package_json("fastfold.kernels", f"tuned/{file.name}")
    return {
        kernel: {
            chip: {
                key: LaunchConfig(**entry, float32=TF32X3 if key.endswith(TF32X3) else "ieee")
                for key, entry in entries.items()
            }
            for chip, entries in chips.items()
        }
        for kernel, chips in table.items()
    }
