"""A kernel with everything that decides its machine code, and what that needs of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastfold.kernels.common.tuning import CHIPS, FALLBACK

TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Triton's names of the kernels' dtypes."""


ARITHMETICS = (
    ("fp32", torch.float32, "ieee"),
    ("tf32", torch.float32, "tf32"),
    ("bf16", torch.bfloat16, "ieee"),
    ("fp16", torch.float16, "ieee"),
)
"""Name, dtype, and ``input_precision`` of the products of all kernels that make some."""


BLOCKS = frozenset(("BT", "BQ", "BK", "BM", "BH", "BO", "BI", "BJ", "BA", "BE", "BS"))
"""Names that kernels give the sizes of their blocks."""


@dataclass(frozen=True)
class Specimen:
    """A kernel with everything that decides its machine code.

    Attributes:
        name: Name in the table of results, with what the specimen stands for: ``attention_forward bf16 D=32``.
        kernel: The ``triton.jit`` function.
        signature: Triton types of the run-time arguments by name (``*bf16``, ``i32``, ``fp32``).
        constants: Values of the ``tl.constexpr`` arguments, block sizes included, and of run-time arguments that
            a launch specialises on (strides of 1, pointers that are None).
        num_warps: Warps of a program.
        num_stages: Stages of software pipelining.
        aligned: Integer arguments that are multiples of 16 in a usual launch and not in ``do_not_specialize``.
            Pointers are taken to be aligned.
        chip: Class of chips, of :data:`~fastfold.kernels.common.tuning.CHIPS`, that the configuration is for.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    aligned: Sequence[str] = ()
    chip: str = FALLBACK

    @property
    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it ships for."""
        return CHIPS[self.chip].architectures

    @property
    def blocks(self) -> dict[str, int]:
        """Its block sizes, by their names in the table of configurations."""
        return {n: x for n, x in self.constants.items() if n in BLOCKS}

    def defect(self, needs: Needs) -> str | None:
        """Why the configuration must not ship with what its machine code needs; None if it may."""
        if needs.spills:
            return f"{needs.spills} bytes per thread do not fit into registers"
        most = CHIPS[self.chip].shared
        return f"{needs.shared} of {most} bytes of shared memory" if needs.shared > most else None


@dataclass(frozen=True)
class Needs:
    """What a compiled kernel needs of a GPU.

    Attributes:
        registers: Per thread.
        shared: Bytes of shared memory per program.
        spills: Bytes per thread that do not fit into registers.
    """

    registers: int
    shared: int
    spills: int
