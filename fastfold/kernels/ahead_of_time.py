"""Compiling Triton kernels without a GPU, to see what they need of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Specimen:
    """A kernel with everything that decides its machine code.

    Attributes:
        name: Name in the table of results, with what the specimen stands for: ``attention_forward bf16 D=32``.
        kernel: The ``triton.jit`` function.
        signature: Triton types of the run-time arguments by name (``*bf16``, ``i32``, ``fp32``).
        constants: Values of the ``tl.constexpr`` arguments, block sizes included.
        num_warps: Warps of a program.
        num_stages: Stages of software pipelining.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2


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
