"""Launch configurations of the Triton kernels: a table that ships, so that no first call tunes for minutes.

Sizes that only scale the grid are run-time arguments and no key of the table: a kernel is compiled per configuration
and dtype, not per sequence length.

An entry is timed if it says on which GPU (``timed_on``). Nobody has timed the others. They were chosen by what the
compiled code needs: blocks, or stages, as large as possible whose registers do not spill on any architecture of the
class, with Triton 3.6 and with 3.9, in a class of its own only if a processor holds no fewer than two programs of
them, or as many as with the entry of ``any``. Kernels that need next to no shared memory (layer norm, softmax, pair
bias, residual update), products of float32, which fill registers first, and RTX cards, whose shared memory is what
``any`` is made for, take the entries of ``any``; attention has some for RTX cards too. Those of attention were chosen
with Triton 3.9 alone, on B200 with 4 warps where 8 would wait for the same product of tensor cores, in float32 by the
instructions for a score and by the programs that a processor holds, with tf32 and without, and apart from these for
tf32x3; so were those of the outer product mean, in 16 bits by the instructions for a multiply-add, and those of all
other products for tf32x3, by the instructions of a whole program, from 64 channels on in blocks whose products no two
warps make, wherever such a block does not spill. With 3.6 30 builds of 2,301 spill, 8 to 40 bytes per thread, none of
them in an innermost loop; see ``benchmarks/README.md``.
``python benchmarks/kernels/run.py --tune`` writes entries of the GPU that it runs on.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch

from fastfold.errors import ConfigError

TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Triton's names of the kernels' dtypes."""

FLOAT32_VARIABLE = "FASTFOLD_FLOAT32_PRODUCTS"
"""Environment variable that decides how the kernels make products of float32."""

TF32X3 = "tf32x3"
"""Each factor as a sum of two numbers of TF32, and three products of these on tensor cores."""

FALLBACK = "any"
"""Class of chips that the table knows nothing about."""


@dataclass(frozen=True)
class ChipClass:
    """GPUs that share their entries in the table.

    Attributes:
        architectures: Compute capabilities that the entries are built for.
        shared: Bytes of shared memory that a program may use (CUDA programming guide, table of compute capabilities).
    """

    architectures: tuple[int, ...]
    shared: int


CHIPS = {
    "sm_80": ChipClass((80,), 163 * 1024),
    "sm_90": ChipClass((90,), 227 * 1024),
    "sm_100": ChipClass((100,), 227 * 1024),
    "rtx": ChipClass((89,), 99 * 1024),
    FALLBACK: ChipClass((80, 90, 100), 99 * 1024),
}
"""Classes of chips by name; entries of the last serve all others too, so that they fit into the least memory."""


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched.

    Attributes:
        blocks: Its block sizes (``tl.constexpr`` arguments), by name.
        num_warps: Warps of a program.
        num_stages: Stages of software pipelining.
        float32: How exact products of float32 are made: ``ieee``, or :data:`TF32X3`, whose entries have own keys.
        timed_on: The GPU on which it was found to be the fastest, or None if nobody has timed it.
    """

    blocks: dict[str, int]
    num_warps: int = 4
    num_stages: int = 2
    float32: str = "ieee"
    timed_on: str | None = field(default=None, compare=False)

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
    """Class in :data:`CHIPS`: ``sm_80`` (A100), ``sm_90`` (H100, H200), ``sm_100`` (B200), ``rtx`` or ``any``."""
    if device.type != "cuda" or torch.version.hip is not None:
        return FALLBACK
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) in ((8, 0), (9, 0), (10, 0), (10, 3)):
        return f"sm_{major}0"
    return "rtx" if major >= 8 else FALLBACK


def float32_products(device: torch.device) -> str:
    """How kernels may make products of float32 where PyTorch's setting asks for exact ones (``highest``).

    ``tf32x3`` where tensor cores have TF32: its error is that of products of float32, in fewer instructions. Only
    kernels whose table has an entry for it take it. ``ieee``, fused multiply-adds of float32, elsewhere, and where
    :data:`FLOAT32_VARIABLE` says so.

    Args:
        device: Where the kernels run.

    Raises:
        ConfigError: The variable has another value, or asks a GPU for ``tf32x3`` that has no TF32.
    """
    name = (_recording.float32 if _recording else None) or os.environ.get(FLOAT32_VARIABLE) or "auto"
    if name not in ("auto", TF32X3, "ieee"):
        raise ConfigError(
            f"{FLOAT32_VARIABLE}={name!r}: products of float32 are made by auto, {TF32X3} or ieee"
        )
    chip = _recording.chip if _recording else chip_class(device)
    if name == "auto":
        return "ieee" if chip == FALLBACK else TF32X3
    if name == TF32X3 and chip == FALLBACK and device.type == "cuda":
        raise ConfigError(f"this GPU has no products of TF32: leave out {FLOAT32_VARIABLE}={name}")
    return name


def launch_config(kernel: str, key: str, device: torch.device) -> LaunchConfig:
    """The tuned configuration of a kernel.

    Args:
        kernel: Its name in the table.
        key: What the best configuration depends on, such as dtype and head channels: ``bf16_32``. A key that the table
            lacks takes the entry without ``_tf32x3`` at its end, or else the kernel's entry ``any``.
        device: Where it runs.

    Raises:
        KeyError: The table has no entry for the kernel at all.
    """
    entries = configurations()[kernel]
    for chip in (_recording.chip if _recording else chip_class(device), FALLBACK):
        for name in (key, key.removesuffix(f"_{TF32X3}"), FALLBACK):
            if name in entries.get(chip, {}):
                if _recording:
                    _recording.origins[kernel] = chip
                return entries[chip][name]
    raise KeyError(f"no configuration of {kernel} for {key}")


@dataclass
class _Recording:
    """The class of chips that every device passes for, how it makes products, and whose entry each kernel has."""

    chip: str
    float32: str | None
    origins: dict[str, str] = field(default_factory=dict)


_recording: _Recording | None = None


@contextmanager
def as_chip(chip: str, float32: str | None = None) -> Iterator[dict[str, str]]:
    """Inside, configurations are those of a class of chips, whatever the device. For the whole process.

    Args:
        chip: Of :data:`CHIPS`.
        float32: What :func:`float32_products` says; None for what suits the class.

    Yields:
        By kernel, the class whose entry was last found: this one, or ``any``.
    """
    global _recording
    _recording = _Recording(chip, float32)
    try:
        yield _recording.origins
    finally:
        _recording = None


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
            chip: {
                key: LaunchConfig(**entry, float32=TF32X3 if key.endswith(TF32X3) else "ieee")
                for key, entry in entries.items()
            }
            for chip, entries in chips.items()
        }
        for kernel, chips in table.items()
    }
