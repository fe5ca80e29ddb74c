"""Steps of the first hour on a GPU: their commands, requirements and time limits."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
PROBES = str(Path(__file__).with_name("probes.py"))


@dataclass(frozen=True)
class Step:
    """Command in a separate process.

    Attributes:
        name: Name in the report.
        command: Arguments; the interpreter's own path is added in front of a script or ``-m``.
        minutes: Time limit.
        gpus: Number of CUDA devices required; 0 runs on a CPU too.
        program: Required program on PATH.
        environment: Environment variables to add.
    """

    name: str
    command: Sequence[str]
    minutes: float = 10.0
    gpus: int = 0
    program: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """Command line to run."""
        return [*self.command] if self.program else [sys.executable, *self.command]

    def missing(self) -> str | None:
        """Return the requirement that this machine does not meet, or None."""
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < self.gpus:
            return f"needs {self.gpus} CUDA device{'s' * (self.gpus > 1)}, found {found}"
        if self.program is not None and shutil.which(self.program) is None:
            return f"needs {self.program} on PATH"
        return None


def all_steps(device: str, scratch: Path) -> list[Step]:
    """Return all steps in the order in which they run.

    Args:
        device: ``cuda``, or ``cpu`` for a trial with small sizes.
        scratch: Empty folder for the steps' files.
    """
    gpu = device != "cpu"
    kernels = ["benchmarks/kernels/run.py", "--device", device, "--out", str(scratch)]
    sizes = ["--sizes", "17", "48", "256"] if gpu else ["--sizes", "17"]
    lengths = ["256", "1024", "2048"] if gpu else ["48"]
    long = ["benchmarks/long_sequence.py", "--part", "network", "--device", device, "--residues", *lengths]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    steps = [
        Step("environment", [PROBES, "environment"], 1),
        Step("kernels once, fp32", [*kernels, "--check", "--dtype", "float32", *sizes]),
        Step("kernels once, bf16", [*kernels, "--check", *sizes]),
        Step("kernels large", [*kernels, "--check"], 15, gpus=1),
        Step("tests of kernels", [*pytest, "-m", "not slow and not nccl", "tests/kernels"], 20, gpus=1),
        Step(
            "compute-sanitizer",
            # PyTorch asks for shareable memory, and does without if the driver refuses.
            [
                "compute-sanitizer",
                "--report-api-errors",
                "no",
                "--error-exitcode",
                "9",
                sys.executable,
                *kernels,
                "--check",
                *sizes[:2],
            ],
            20,
            gpus=1,
            program="compute-sanitizer",
        ),
        Step("assemblers", [PROBES, "assemblers"], 10, gpus=1),
        Step("verify", [PROBES, "verify", "--device", device], 10),
        Step("folds by fp32 and bf16", [PROBES, "precisions", "--device", device], 10),
        Step("CUDA graphs", [PROBES, "graphs"], 10, gpus=1),
        Step("planned memory", [*long, "--dtype", "bf16" if gpu else "fp32", "--msa", "8"], 10),
        Step("out of memory", [PROBES, "out-of-memory"], 10, gpus=1),
        Step("Gemini", [*pytest, "-m", "gpu", "tests/memory"], 10, gpus=1),
        Step("train and resume", [PROBES, "train", "--out", str(scratch / "train")], 10),
        Step("speed of kernels", kernels, 12, gpus=1),
        Step("tune kernels", [*kernels, "--tune"], 12, gpus=1),
        Step("kernels on cuda:1", [*kernels, "--check", "--device", "cuda:1", *sizes], 10, gpus=2),
        Step("fold on cuda:1", [PROBES, "precisions", "--device", "cuda:1"], 10, gpus=2),
        Step("screen by two workers", [PROBES, "screen", "--out", str(scratch / "screen")], 10, gpus=2),
        Step("NCCL", [*pytest, "-m", "nccl", "tests/parallel", "tests/training"], 30, gpus=2),
    ]
    return steps
