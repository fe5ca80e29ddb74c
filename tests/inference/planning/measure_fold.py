"""Peak memory of one fold, measured.

Usage: python -m tests.inference.planning.measure_fold PRESET RESIDUES PRECISION ROWS PLAN

The network is an official one with one Evoformer and one extra MSA block (further blocks reuse their memory) and random
parameters; the alignment is random too. One recycle is run, because the recycled tensors live beside the new ones,
after a tiny fold that is not measured. Needs Linux with glibc. Prints one JSON object, sizes in bytes.
"""

from __future__ import annotations

import gc
import json
import sys

from fastfold.cli.process import prepare_environment

prepare_environment()  # as the command line does, before PyTorch is loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402

from fastfold.data.features.pipeline import featurize  # noqa: E402
from fastfold.data.msa.msa import Msa  # noqa: E402
from fastfold.data.targets import target_from_sequence  # noqa: E402
from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.evoformer.model import AlphaFold  # noqa: E402
from fastfold.evoformer.precision import Precision, element_size, set_precision  # noqa: E402
from fastfold.inference.config import InferConfig  # noqa: E402
from fastfold.inference.folding.network import heap_trim  # noqa: E402
from fastfold.inference.folding.prediction import TargetFold  # noqa: E402
from fastfold.inference.planning.planner import Planner  # noqa: E402
from fastfold.utils.machine import process_memory  # noqa: E402


def measure(preset: str, residues: int, precision: Precision, rows: int, which: str) -> dict[str, int]:
    """Measured peak above what the process held before, and the one that was planned."""
    config = model_config(preset)
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block = trunk.extra_msa_stack_num_block = 1
    config.model.global_config.zero_init = False
    torch.manual_seed(0)
    model = set_precision(AlphaFold(config).eval(), precision)
    planner = Planner(config, element_size(precision), rows=rows, templates=0)
    trim = heap_trim()
    assert trim is not None

    def run(length: int) -> dict[str, int]:
        letters = np.array(list("ARNDCQEGHILKMFPSTWYV"))[
            np.random.default_rng(0).integers(0, 20, (rows, length))
        ]
        sequences = tuple("".join(row) for row in letters)
        msa = Msa(sequences, np.zeros((rows, length), np.int32), tuple(f"row{i}" for i in range(rows)))
        target = target_from_sequence(sequences[0])
        # What was freed before must not be taken again unseen.
        gc.collect()
        trim(0)
        before = process_memory("VmRSS")
        sampler = featurize(target.chains, [([msa], [])], config, seed=0)
        budget = planner.smallest(length) if which == "smallest" else 10**15
        plan = planner.plan(length, budget)
        TargetFold(model, sampler, target, InferConfig(num_recycles=1), 0).run(plan)
        return {"measured": process_memory("VmHWM") - before, "planned": plan.peak, "before": before}

    run(16)  # loads code and starts threads, which is not the fold's own memory
    return run(residues)


if __name__ == "__main__":
    _, preset, residues, precision, rows, which = sys.argv
    print(json.dumps(measure(preset, int(residues), precision, int(rows), which)))  # type: ignore[arg-type]
