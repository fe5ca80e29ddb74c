"""Peak memory of one fold, measured: ``python -m tests.inference.measure_fold PRESET RESIDUES PRECISION ROWS``.

The network is an official one with one Evoformer and one extra MSA block (further blocks reuse their memory) and random
parameters; the alignment is random too. One recycle is run, because the recycled tensors live beside the new ones.
Needs Linux. Prints one JSON object, sizes in bytes.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from fastfold.data.alignment import Msa
from fastfold.data.features import featurize
from fastfold.data.targets import target_from_sequence
from fastfold.evoformer.config import model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.folding import Precision, fold, set_precision
from fastfold.inference.memory_estimate import estimated_bytes


def measure(preset: str, residues: int, precision: Precision, rows: int) -> dict[str, int]:
    """Measured peak above what the process held before, and the estimate of it."""
    config = model_config(preset)
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block = trunk.extra_msa_stack_num_block = 1
    config.model.global_config.zero_init = False
    torch.manual_seed(0)
    model = set_precision(AlphaFold(config).eval(), precision)
    letters = np.array(list("ARNDCQEGHILKMFPSTWYV"))[
        np.random.default_rng(0).integers(0, 20, (rows, residues))
    ]
    sequences = tuple("".join(row) for row in letters)
    msa = Msa(sequences, np.zeros((rows, residues), np.int32), tuple(f"row{i}" for i in range(rows)))
    target = target_from_sequence(sequences[0])
    before = _status("VmRSS")
    sampler = featurize(target.chains, [([msa], [])], config, seed=0)
    fold(model, sampler, target.chains, name="x", model_name="x", seed=0, num_recycles=1)
    estimate = estimated_bytes(
        config, residues, element_size=2 if precision == "bf16" else 4, alignment_rows=rows
    )
    return {"measured": _status("VmHWM") - before, "estimated": estimate, "before": before}


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))  # type: ignore[arg-type]
