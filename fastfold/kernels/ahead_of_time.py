"""Compiling Triton kernels without a GPU, to see what they need of one."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastfold.errors import ConfigError
from fastfold.kernels.backend import interpreted
from fastfold.kernels.tuning import CHIPS, FALLBACK

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
_ALIGNED = [["tt.divisibility", 16]]


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
        chip: Class of chips, of :data:`~fastfold.kernels.tuning.CHIPS`, that the configuration is for.
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


def all_specimens() -> list[Specimen]:
    """What every module ``fastfold/kernels/*_triton.py`` ships, in order of the names."""
    import fastfold.kernels

    names = [m.name for m in pkgutil.iter_modules(fastfold.kernels.__path__) if m.name.endswith("_triton")]
    modules = [importlib.import_module(f"fastfold.kernels.{name}") for name in sorted(names)]
    return [specimen for module in modules for specimen in module.specimens()]


def build(specimen: Specimen, architecture: int) -> Needs:
    """Compile a kernel down to machine code, with the assembler in Triton's wheel.

    Args:
        specimen: The kernel and its configuration.
        architecture: Compute capability, as 80, 90 or 100.

    Returns:
        What the machine code needs.

    Raises:
        ConfigError: The process runs Triton's interpreter, in which kernels are Python functions.
        Exception: Whatever Triton raises if the kernel does not compile.
    """
    if interpreted():
        raise ConfigError("kernels of Triton's interpreter cannot be compiled: unset TRITON_INTERPRET")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = specimen.kernel.arg_names
    signature = {n: "constexpr" if n in specimen.constants else specimen.signature[n] for n in names}
    attributes = {
        (i,): _ALIGNED
        for i, n in enumerate(names)
        if signature[n].startswith("*") or (n in specimen.aligned and n not in specimen.constants)
    }
    source = ASTSource(
        fn=specimen.kernel, signature=signature, constexprs=dict(specimen.constants), attrs=attributes
    )
    options = {
        "num_warps": specimen.num_warps,
        "num_stages": specimen.num_stages,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return needs_of(compiled)


def needs_of(compiled: Any) -> Needs:
    """What the machine code of a kernel that Triton compiled for an NVIDIA GPU needs."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"no resource usage in what cuobjdump prints: {listing!r}")
    registers, stack, local = map(int, found.groups())
    return Needs(registers, compiled.metadata.shared, stack + local)
