"""Work from which products in fewer bits are faster than float32 on this processor, measured once and kept."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold._version import __version__
from fastfold.errors import FastFoldError
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.evoformer.execution import ExecutionPolicy, set_policy
from fastfold.kernels.common.backend import is_traced
from fastfold.kernels.cpu.linear import Products, reduced_products
from fastfold.kernels.cpu.products import exact_products, has_units
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.foreign_text import read_json_object
from fastfold.utils.machine import processor_name, user_cache

CERTAIN_WORK = 4e8
"""Work from which fewer bits are faster on every measured processor with units (``benchmarks/results/choices.md``)."""

UNMEASURED_WORK = 80e6  #: Least work for tensors without data, which take no time

LENGTHS = (16, 24, 32, 48, 64, 96, 128, 160, 192)  #: Residues of the measured calls
_ROWS, _ROUNDS = 64, 6
_MARGIN = 1.05  #: Times faster than float32 from which a length counts, because times vary

MEASURED_POLICY = ExecutionPolicy(block_elements=1 << 22, inplace=True)
"""Policy of the measured calls: that of folds on a CPU, without which fewer bits would seem faster than they are."""

_LARGEST_CACHE = 1 << 20  #: Bytes of a file of kept measurements
_known: dict[str, float] = {}


def work_of(representations: Iterable[Tensor]) -> int:
    """Return the elements of representations ``[*, c]`` times their channels."""
    return sum(x.numel() * x.shape[-1] for x in representations)


def is_faster(representations: Sequence[Tensor], config: ConfigDict, products: Products) -> bool:
    """Return True if a call is faster with ``products`` than in float32, as it never is without units for them.

    Args:
        representations: Those that the call reads; without data, nothing is measured.
        config: ``embeddings_and_evoformer`` of the network's configuration.
        products: Precision of the products.
    """
    if not has_units(products):
        return False
    work = work_of(representations)
    if is_traced() or any(x.device.type != "cpu" for x in representations):
        return work >= UNMEASURED_WORK
    return work >= CERTAIN_WORK or work >= least_work(config, products)


def least_work(config: ConfigDict, products: Products) -> float:
    """Return the least work that is faster with ``products``, from memory, the user's cache, or a measurement.

    The measurement takes a few seconds. It is repeated for another processor, another number of threads, other
    channels, or another release of FastFold or PyTorch. A cache that cannot be read or written is left alone.
    """
    channels = f"{config.msa_channel} x {config.pair_channel} channels"
    parts = (processor_name(), f"{torch.get_num_threads()} threads", channels, products)
    key = ", ".join((*parts, f"fastfold {__version__}", f"torch {torch.__version__}"))
    if key not in _known:
        _known.update(_read())
    if key not in _known:
        _known[key] = measure_least_work(config, products)
        with contextlib.suppress(OSError, FastFoldError):
            cache_file().parent.mkdir(parents=True, exist_ok=True)
            write_atomic(cache_file(), json.dumps(_read() | {key: _known[key]}, indent=1) + "\n")
    return _known[key]


def cache_file() -> Path:
    """Return the file of kept measurements: ``least_work.json`` in the user's cache."""
    return user_cache() / "least_work.json"


def _read() -> dict[str, float]:
    try:
        kept = read_json_object(cache_file(), "least work of precisions", limit=_LARGEST_CACHE)
    except (OSError, FastFoldError):
        return {}
    return {key: value for key, value in kept.items() if isinstance(value, int | float)}


def measure_least_work(config: ConfigDict, products: Products) -> float:
    """Measure Evoformer blocks of growing length, with and without ``products``, in turns, by processor time."""
    # A measurement must not change later random numbers.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(), exact_products(torch.device("cpu")):
        block = EvoformerBlock(config.evoformer, config.msa_channel, config.pair_channel, zero_init=False)
        set_policy(block.eval().requires_grad_(False), MEASURED_POLICY)
        was_faster = False
        for n in LENGTHS:
            msa, pair = torch.randn(_ROWS, n, config.msa_channel), torch.randn(n, n, config.pair_channel)
            is_faster_here = _times_faster(block, (msa, pair), products) > _MARGIN
            if was_faster and is_faster_here:  # two in a row, because other programs disturb times
                return float(work_of((msa, pair)))
            was_faster = is_faster_here
    return CERTAIN_WORK


def _times_faster(block: EvoformerBlock, inputs: tuple[Tensor, Tensor], products: Products) -> float:
    masks = [torch.ones(x.shape[:-1]) for x in inputs]
    best = [float("inf"), float("inf")]
    for _ in range(_ROUNDS):
        for i, kind in enumerate((None, products)):
            copies = [x.clone() for x in inputs]
            context: AbstractContextManager[None] = nullcontext() if kind is None else reduced_products(kind)
            with context:
                start = time.process_time()
                block(*copies, *masks)
                best[i] = min(best[i], time.process_time() - start)
    return best[0] / best[1]
