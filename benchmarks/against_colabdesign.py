"""Steps of a design by FastFold against those of the ColabDesign program, on this machine's processor.

Usage: python benchmarks/against_colabdesign.py --colabdesign DIR --python PROGRAM [--residues 64 100] [--blocks 8]

DIR is a checkout of ColabDesign (https://github.com/sokrypton/ColabDesign), PROGRAM a Python with jax and the packages
that it needs, in an environment of its own. Nothing of them is installed or copied. Both hallucinate with the same
random parameters of ``model_3_ptm`` with a number of its 48 blocks, in float32, on one core. Steps alternate; times are
processor time, so that other work on the machine counts little. Without ``--dropout``, the losses of every step must
agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import numpy as np  # noqa: E402
import torch  # noqa: E402

from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.evoformer.model import AlphaFold  # noqa: E402
from fastfold.evoformer.weights.checkpoint import convert, load_model, save_weights  # noqa: E402
from fastfold.products.design import DesignConfig, hallucination  # noqa: E402
from fastfold.products.design.evaluate import Evaluator  # noqa: E402
from fastfold.products.design.optimize import DesignState, first_state, optimize  # noqa: E402
from fastfold.utils.atomic_files import write_atomic  # noqa: E402

WEIGHTS = {"con": 1.0, "plddt": 0.1, "pae": 0.1}
_NOISE, _AGREEMENT = 0.05, 1e-3


def random_network(blocks: int, folder: Path) -> Path:
    """Write random parameters of ``model_3_ptm``, none of them zero, as an official file; return its path."""
    config = model_config("model_3_ptm")
    config.model.embeddings_and_evoformer.evoformer_num_block = blocks
    torch.manual_seed(0)
    model = AlphaFold(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(_NOISE * torch.randn_like(parameter))
    save_weights(folder / "random.safetensors", model, config)
    official = folder / "params_model_3_ptm.npz"
    convert(folder / "random.safetensors", official)
    return official


class OurDesign:
    """Hallucination that takes the same step of a schedule again and again."""

    def __init__(self, network: Path, blocks: int, request: dict[str, Any]) -> None:
        config = model_config("model_3_ptm")
        config.model.embeddings_and_evoformer.evoformer_num_block = blocks
        model = load_model(network, config=config)
        self._evaluator = Evaluator(
            hallucination(request["residues"]),
            [model],
            WEIGHTS,
            recycles=request["recycles"],
            recycle_mode=request["recycle_mode"],
        )
        self._config = DesignConfig(
            soft_steps=1,
            temperature_steps=0,
            hard_steps=0,
            recycles=request["recycles"],
            recycle_mode=request["recycle_mode"],
            dropout=request["dropout"],
            ramp_recycles=False,
        )
        self._state: DesignState = first_state(self._evaluator, self._config, 0)
        self._state.parameters = torch.tensor(request["sequence"], dtype=torch.float32)

    def step(self) -> tuple[float, dict[str, float]]:
        """Take a step; return its processor time in seconds, and its losses by name."""
        self._state.step = 0
        start = time.process_time()
        optimize(self._evaluator, self._config, 0, self._state)
        seconds = time.process_time() - start
        return seconds, {name: self._state.log[-1][name] for name in ("loss", *WEIGHTS)}


class TheirProgram:
    """Process with the ColabDesign program.

    Raises:
        RuntimeError: The process ended.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        core = str(min(os.sched_getaffinity(0)))
        program = Path(__file__).with_name("colabdesign_program.py")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [
                "taskset",
                "-c",
                core,
                options.python,
                program,
                options.colabdesign,
                folder,
                str(options.blocks),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"JAX_PLATFORMS": "cpu"},
        )
        self.versions = self._answer()

    def step(self, request: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Take the next step of a design; return its processor time in seconds, and its losses by name."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(answer["seconds"]), answer["losses"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the ColabDesign program ended (status {self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def compare(
    theirs: TheirProgram, network: Path, blocks: int, request: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Return figures of alternating steps: seconds of each program with and without recomputation, and ratios.

    A RuntimeError tells that losses differ.
    """
    ours = OurDesign(network, blocks, request)
    seconds: dict[str, list[float]] = {"ours": [], "recomputed": [], "kept": []}
    difference = 0.0
    for number in range(rounds + 1):
        times = {}
        times["ours"], losses = ours.step()
        for name in ("recomputed", "kept"):
            times[name], wanted = theirs.step(request | {"recompute": name == "recomputed"})
            gaps = [abs(losses[key] - wanted[key]) / abs(wanted[key]) for key in losses]
            difference = max(difference, *gaps)
            if not request["dropout"] and difference > _AGREEMENT:
                raise RuntimeError(f"step {number + 1}: losses differ, ours {losses}, theirs {wanted}")
        if number:  # the first step compiles
            for name, value in times.items():
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "residues": request["residues"],
        "ours": medians["ours"],
        "theirs": medians["recomputed"],
        "theirs_kept": medians["kept"],
        "ratio": medians["recomputed"] / medians["ours"],
        "ratio_kept": medians["kept"] / medians["ours"],
        "largest_difference": None if request["dropout"] else difference,
        "load": os.getloadavg()[0],
        "all": seconds,
    }


def main() -> None:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--colabdesign", type=Path, required=True, metavar="DIR")
    parser.add_argument("--python", required=True, metavar="PROGRAM", help="Python with jax")
    parser.add_argument("--residues", type=int, nargs="+", default=[64, 100])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recycles", type=int, default=0)
    parser.add_argument("--recycle-mode", default="last")
    parser.add_argument(
        "--bfloat16", action="store_true", help="ColabDesign's default precision in its program"
    )
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--machine", default="", help="name of the machine in the file")
    options = parser.parse_args()
    if not (options.colabdesign / "colabdesign" / "af" / "model.py").is_file():
        parser.error(f"{options.colabdesign} is not a checkout of ColabDesign")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        network = random_network(options.blocks, Path(name))
        theirs = TheirProgram(options, Path(name))
        try:
            for residues in options.residues:
                start = np.random.default_rng(0).normal(size=(residues, 20))
                request = {
                    "residues": residues,
                    "sequence": start.tolist(),
                    "weights": WEIGHTS,
                    "soft": 1.0,
                    "dropout": options.dropout,
                    "recycles": options.recycles,
                    "recycle_mode": options.recycle_mode,
                    "bfloat16": options.bfloat16,
                }
                row = compare(theirs, network, options.blocks, request, options.rounds)
                rows.append(row)
                print(json.dumps(row), flush=True)
        finally:
            theirs.close()
    if options.json is not None:
        versions = {"torch": torch.__version__, **theirs.versions}
        report = {"machine": options.machine, "versions": versions, "blocks": options.blocks, "cases": rows}
        write_atomic(options.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
