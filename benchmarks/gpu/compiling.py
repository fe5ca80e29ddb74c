"""First part of ``whole_folds.py``: compile kernels in several processes, so that no timed part does.

DeepMind's program is compiled by JAX at the same time.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.deepmind import answers, compilations
from benchmarks.gpu.timing import TOY, Line, Sizes, in_short, network_of, random_target

PROCESSES = 8
RESIDUES, ROWS = 48, 32  #: Sizes of a call; kernels are compiled for all lengths
NETWORKS = (("model_1_ptm", "bf16"), ("model_1_multimer_v3", "bf16"), ("model_1_ptm", "fp32"))
OPERATORS = (
    *("triangle_multiplication", "triangle_attention", "row_attention", "outer_product_mean", "transition"),
    *("row_transition", "pair_bias", "layer_norm", "residual_update"),
)


def kernels(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield the seconds of each job: networks with a block of each stack, and operators with their gradients.

    The line of a job that fails has its ``error``; the others go on.
    """
    processes = min(PROCESSES, os.cpu_count() or 1)
    jobs = [*NETWORKS, *((name, "gradients") for name in OPERATORS)]
    if sizes is TOY:
        jobs = [NETWORKS[0], (OPERATORS[-1], "gradients")]
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool,
    ):
        programs = compilations(device, sizes, Path(folder))
        waiting = {pool.submit(compile_job, name, mode, device): (name, mode) for name, mode in jobs}
        for done in as_completed(waiting):
            name, mode = waiting[done]
            line: Line = {"compiled": name, "mode": mode, "processes": processes}
            if (error := done.exception()) is None:
                yield line | {"seconds": round(done.result(), 2)}
            else:
                yield line | {"error": in_short(error)}
        for residues, program in programs.items():
            line = {"compiled": "AlphaFold", "residues": residues}
            try:
                answers(program)
            except RuntimeError as error:
                yield line | {"error": in_short(error)}
            else:
                yield line | {"seconds": round(time.perf_counter() - start, 2)}


def compile_job(name: str, mode: str, device: str) -> float:
    """Run a network's pass in a precision, or an operator forward and backward in bf16; return the seconds."""
    from fastfold.cli.process import prepare_environment

    prepare_environment()  # must precede the import of PyTorch
    start = time.perf_counter()
    if mode == "gradients":
        _run_operator(name, device)
    else:
        import fastfold

        model = network_of(name, device, mode, replace(Sizes(), blocks=1))
        sequence, msa = random_target(RESIDUES, ROWS)
        fastfold.predict(sequence, model, msa=msa, num_recycles=0, cuda_graphs=False)
    return time.perf_counter() - start


def _run_operator(name: str, device: str) -> None:
    import torch
    from torch import Tensor

    from benchmarks.kernels.cases import cases
    from benchmarks.kernels.rivals import implementations

    on = torch.device(device)
    ours = next(one for one in implementations(name, on) if one.name == "fastfold")
    case = next(one for one in cases((RESIDUES,), ((ROWS, RESIDUES),)) if one.operator == name)
    inputs = case.make(on, torch.bfloat16)
    leaves = [x for key, x in inputs.items() if isinstance(x, Tensor) and key not in case.constants]
    for x in leaves:
        x.requires_grad_()
    out = ours.function(**inputs)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
