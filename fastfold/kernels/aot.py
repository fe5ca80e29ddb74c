"""Compiling Triton kernels without a GPU, to see what they need of one."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError
from fastfold.kernels import ops
from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.common.kernel_variant import Needs, Specimen

_ALIGNED = [["tt.divisibility", 16]]


def all_specimens() -> list[Specimen]:
    """What every module ``triton_*`` below ``fastfold/kernels/ops`` ships, in order of the names."""
    found = [m.name for m in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    names = sorted(name for name in found if name.rpartition(".")[2].startswith("triton_"))
    modules = [importlib.import_module(name) for name in names]
    return [x for module in modules if hasattr(module, "specimens") for x in module.specimens()]


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
