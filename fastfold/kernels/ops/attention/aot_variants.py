"""What is built ahead of time of the attention kernels: every arithmetic, width of a head and configuration."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from fastfold.kernels.common.kernel_variant import ARITHMETICS, TRITON_TYPES, Specimen
from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.tuning import LaunchConfig, shipped

CHANNELS = (8, 16, 32, 64, 128)
"""Channels of a head that specimens are made for."""

_TYPES = {"mask": "*u8", "lse": "*fp32", "delta": "*fp32", "grad_bias": "*fp32", "scale": "fp32"}
_TENSORS = frozenset(
    ("q", "k", "v", "bias", "gate", "out", "grad", "grad_out", "grad_q", "grad_k", "grad_v", "grad_gate")
)
_SIZES = ("heads", "rows", "queries", "keys", "row_step")


def attention_specimens(kernels: Iterable[Any]) -> list[Specimen]:
    """The kernels, with bias, mask and gate: what they need at most."""
    found = []
    for kernel, (arithmetic, dtype, precision), channels in itertools.product(kernels, ARITHMETICS, CHANNELS):
        if precision == "tf32" and "PRECISION" not in kernel.arg_names:
            continue
        name = kernel.__name__.removesuffix("_kernel")
        key = f"{TRITON_TYPES[dtype]}_{padded(channels)}"
        plain = shipped(name, key)
        short = [entry for entry in shipped(name, f"{key}_short") if entry not in plain]
        for size, entries in (("", plain), ("short ", short)):
            for chip, config in entries:
                title = f"{name} {arithmetic} D={channels} {size}{chip}"
                found.append(_specimen(title, kernel, TRITON_TYPES[dtype], precision, channels, chip, config))
    return found


def _specimen(
    name: str, kernel: Any, dtype: str, precision: str, channels: int, chip: str, config: LaunchConfig
) -> Specimen:
    signature = {
        n: _TYPES.get(n) or (f"*{dtype}" if n in _TENSORS else "i32")
        for n in kernel.arg_names
        if not n.isupper()
    }
    blocks = {"D": channels, "BD": padded(channels), **config.blocks}
    switches = {"HAS_BIAS": True, "HAS_MASK": True, "HAS_GATE": True, "PRECISION": precision}
    constants = {n: x for n, x in (blocks | switches).items() if n in kernel.arg_names}
    # As in a usual launch, except that bias_q is aligned only where the number of keys is.
    unit = {n: 1 for n in ("bias_k", "mask_n") if n in signature}
    integers = [n for n in signature if signature[n] == "i32" and n not in (*_SIZES, *unit)]
    aligned = [n for n in integers if channels % 16 == 0 or not n.endswith("_h")]
    return Specimen(
        name, kernel, signature, constants | unit, config.num_warps, config.num_stages, aligned, chip
    )
