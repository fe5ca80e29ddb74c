"""Compilation of Triton kernels without a GPU, to read the resources that they need."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.kernels.variants import KernelVariant, Needs
from fastfold.errors import ConfigError
from fastfold.kernels.common.backend import interpreted


def build(variant: KernelVariant, architecture: int) -> Needs:
    """Compile a kernel for a compute capability, such as 80, with the assembler in Triton's wheel.

    Raises:
        ConfigError: The process runs Triton's interpreter, in which kernels are Python functions.
        Exception: Any exception of Triton if the kernel does not compile.
    """
    if interpreted():
        raise ConfigError("cannot compile kernels in Triton's interpreter: unset TRITON_INTERPRET")
    with no_gpu(architecture):
        return needs_of(variant.kernel.run(*variant.arguments, grid=(1,), warmup=True, **variant.options))


class _NoGpu:
    """Replacement for Triton's driver before a launch, on a machine without a GPU."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture  # Triton keeps compiled kernels for each device separately

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def no_gpu(architecture: int) -> Iterator[None]:
    """Let Triton compile for an architecture without launching, for the whole process."""
    from triton.runtime import driver

    before = driver._active  # the property that creates it raises an error without a GPU
    driver.set_active(_NoGpu(architecture))
    try:
        yield
    finally:
        driver._active = before


def needs_of(compiled: Any) -> Needs:
    """Return the resources that the machine code of a kernel compiled for an NVIDIA GPU needs."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"expected a resource usage from cuobjdump, found {listing!r}")
    registers, stack, local = map(int, found.groups())
    return Needs(registers, compiled.metadata.shared, stack + local)
