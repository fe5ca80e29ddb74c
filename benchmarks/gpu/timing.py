"""Sizes, clocks and networks of the parts of ``whole_folds.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SITE = REPOSITORY / ".gpu" / "site"

PASSES = 4  #: Passes of a fold

Line = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts.

    Attributes:
        lengths: Residues of folds.
        float32_lengths: Residues of folds in float32.
        rows: Rows of the alignment.
        crops: Residues of a training step, with rows of the clustered and of the extra alignment.
        long_lengths: Residues of single passes of a network with two blocks.
        budget: Memory of the longest protein's plan.
        block_lengths: Residues of blocks beside OpenFold's.
        block_rows: Rows of the alignment of these blocks, and their number.
        triangle_lengths: Residues of triangle multiplications.
        blocks: Evoformer blocks of a network; None for the official number.
    """

    lengths: Sequence[int] = (100, 256, 512, 1024, 2048)
    float32_lengths: Sequence[int] = (256, 1024)
    rows: int = 1536
    crops: Sequence[tuple[int, int, int]] = ((256, 128, 1024), (384, 512, 5120))
    long_lengths: Sequence[int] = (4096, 6000)
    budget: str = "78GiB"
    block_lengths: Sequence[int] = (256, 512, 1024)
    block_rows: tuple[int, int] = (512, 8)
    triangle_lengths: Sequence[int] = (1024, 512, 256, 128, 2048)
    blocks: int | None = None


def release_memory(device: str) -> None:
    """Free the memory that PyTorch keeps on a GPU, and begin to count its peak."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def in_short(error: BaseException) -> str:
    """Return the kind and the message of an error, at most 600 characters."""
    return f"{type(error).__name__}: {error}"[:600]


def reported(line: Line, lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines after the items of ``line``; a failure is a line with its ``error``, and others may follow."""
    try:
        for own in lines:
            yield line | own
    except Exception as error:
        yield line | {"error": in_short(error)}


TOY = Sizes((12, 17), (12,), 6, ((12, 4, 6),), (24,), "2GiB", (12,), (4, 1), (12,), 1)


class Stopwatch:
    """Times of a call: on the host until it returns, and on the device until its last operator has ended."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.host_ms = self.device_ms = self.wall_ms = 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what runs inside."""
        import torch

        on_gpu = self.device == "cuda"
        wait: Callable[[], None] = (
            getattr(torch, self.device).synchronize if self.device != "cpu" else lambda: None
        )
        wait()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else (None, None)
        start = time.perf_counter()
        if begin is not None:
            begin.record()
        yield
        self.host_ms = 1e3 * (time.perf_counter() - start)
        if end is not None:
            end.record()
        wait()
        self.wall_ms = 1e3 * (time.perf_counter() - start)
        self.device_ms = begin.elapsed_time(end) if begin is not None and end is not None else self.wall_ms

    def line(self) -> Line:
        """Return the times, rounded."""
        return {name: round(getattr(self, name), 3) for name in ("host_ms", "device_ms", "wall_ms")}


def network_of(name: str, device: str, precision: str, sizes: Sizes) -> Any:
    """Return a network with random parameters."""
    from fastfold.evoformer.config import model_config
    from fastfold.evoformer.model import AlphaFold
    from fastfold.evoformer.precision import set_precision

    config = model_config(name)
    config.model.global_config.zero_init = False
    if sizes.blocks is not None:
        trunk = config.model.embeddings_and_evoformer
        trunk.evoformer_num_block = trunk.extra_msa_stack_num_block = sizes.blocks
    network = set_precision(AlphaFold(config), precision).to(device).eval()
    network.name = name
    return network


def random_target(residues: int, rows: int) -> tuple[str, Any]:
    """Return a random sequence and an alignment whose rows share six tenths of it."""
    import numpy as np

    from fastfold.data.msa.msa import Msa
    from fastfold.protein.residue_constants import restypes

    random = np.random.default_rng(residues)
    query = random.integers(20, size=residues)
    aligned = np.where(
        random.random((rows, residues)) < 0.4, random.integers(20, size=(rows, residues)), query
    )
    aligned[0] = query
    letters = tuple("".join(restypes[i] for i in row) for row in aligned)
    return letters[0], Msa(
        letters, np.zeros((rows, residues), np.int32), tuple(f"row_{i}" for i in range(rows))
    )
