"""Design steps of the ColabDesign program, timed on request.

Usage: python benchmarks/colabdesign_program.py CHECKOUT PARAMETERS BLOCKS

It needs jax and the packages that ColabDesign needs, and nothing of FastFold. ``benchmarks/against_colabdesign.py``
runs it. PARAMETERS is a folder with ``params_model_3_ptm.npz``, BLOCKS the number of Evoformer blocks. Each line of the
standard input is a JSON object with the settings of a design. The answer is the processor time of its next step in
seconds, and the losses of the step. The first line of the output names the versions.
"""

from __future__ import annotations

import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import numpy as np

# The package's first module imports networks that hallucinations do not need.
_package = types.ModuleType("colabdesign")
_package.__path__ = [str(Path(sys.argv[1]).resolve() / "colabdesign")]
sys.modules["colabdesign"] = _package

from colabdesign.af.model import mk_af_model  # noqa: E402


def hallucination(request: dict[str, Any], parameters: str, blocks: int) -> Any:
    """Return a design of a length by one network, before its first step."""
    model = mk_af_model(
        protocol="hallucination",
        data_dir=parameters,
        model_names=["model_3_ptm"],
        use_bfloat16=request["bfloat16"],
        use_remat=request["recompute"],
        recycle_mode=request["recycle_mode"],
        num_recycles=request["recycles"],
    )
    model._cfg.model.embeddings_and_evoformer.evoformer_num_block = blocks
    length = request["residues"]
    model.prep_inputs(length=length)
    # Modes of several passes in one call read no first state from the settings; they take this one.
    model._inputs["prev"] = {
        "prev_msa_first_row": np.zeros([length, 256], np.float32),
        "prev_pair": np.zeros([length, length, 128], np.float32),
        "prev_pos": np.zeros([length, 37, 3], np.float32),
    }
    model.set_seq(seq=np.array(request["sequence"]))
    model.set_opt(dropout=request["dropout"], soft=request["soft"])
    model.set_weights(**request["weights"])
    return model


def main() -> None:
    """Answer requests until the input ends."""
    print(json.dumps({"jax": jax.__version__, "haiku": hk.__version__}), flush=True)
    designs: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if line not in designs:
            designs[line] = hallucination(request, sys.argv[2], int(sys.argv[3]))
        start = time.process_time()
        designs[line].step(verbose=0)
        seconds = time.process_time() - start
        aux = designs[line].aux
        losses = {name: float(aux["losses"][name]) for name in request["weights"]}
        losses["loss"] = float(aux["loss"])
        print(json.dumps({"seconds": seconds, "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
