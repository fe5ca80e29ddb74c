"""Speed of training the small network on this machine, and cost of its loader and checkpoints.

Usage: python benchmarks/train_step.py [--steps N] [--json OUT] [HYDRA OVERRIDES]

Trains ``+preset=mini`` on artificial chains of 112 to 200 residues with alignments of 64 rows. Prints the median time
of a step and residues per second, with the machine's matrix-product rate for comparison with other machines. Also
prints the share of time in which the network waits for the loader, and the time of a checkpoint, in steps and spread
over the default interval.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import numpy as np  # noqa: E402
import torch  # noqa: E402

from fastfold.products.design.gradient_report import product_rate  # noqa: E402
from fastfold.protein import residue_constants as rc  # noqa: E402
from fastfold.protein.io.pdb_writer import to_pdb  # noqa: E402
from fastfold.protein.protein import Protein  # noqa: E402
from fastfold.training.checkpoint.checkpoints import Checkpoints  # noqa: E402
from fastfold.training.compose import compose_config  # noqa: E402
from fastfold.training.run import train  # noqa: E402

LENGTHS = (112, 128, 150, 175, 200)
ROWS = 64
LOADER_AIM, STALL_AIM = 0.01, 0.02


def write_chains(folder: Path, rng: np.random.Generator) -> None:
    """Write chains with a backbone along a random walk, and alignments of random relatives."""
    (folder / "msas").mkdir(parents=True)
    backbone = np.array([[-0.5, 1.4, 0.0], [0.0, 0.0, 0.0], [1.5, 0.0, 0.0], [2.1, -1.1, 0.0]])  # N CA C O
    slots = [rc.atom_order[name] for name in ("N", "CA", "C", "O")]
    for number, length in enumerate(LENGTHS):
        aatype = rng.integers(20, size=length)
        steps = rng.normal(size=(length, 3))
        ca = np.cumsum(3.8 * steps / np.linalg.norm(steps, axis=-1, keepdims=True), axis=0)
        rotations = np.linalg.qr(rng.normal(size=(length, 3, 3)))[0]
        positions = np.zeros((length, 37, 3))
        positions[:, slots] = np.einsum("nij,aj->nai", rotations, backbone) + ca[:, None]
        mask = np.zeros((length, 37))
        mask[:, slots] = 1
        index = np.arange(1, length + 1)
        chain = Protein(positions, mask, aatype, index, np.zeros(length), np.zeros((length, 37)))
        (folder / f"chain{number}.pdb").write_text(to_pdb(chain))
        relatives = np.where(rng.random((ROWS, length)) < 0.4, rng.integers(20, size=(ROWS, length)), aatype)
        relatives[0] = aatype
        rows = (f">r{i}\n{rc.aatype_to_sequence(row)}\n" for i, row in enumerate(relatives))
        (folder / "msas" / f"chain{number}.a3m").write_text("".join(rows))


def measure(steps: int, overrides: list[str]) -> dict[str, Any]:
    """Train in a temporary folder and read the run's records."""
    stalls: list[float] = []
    save = Checkpoints.save

    def timed(self: Checkpoints, *arguments: Any) -> None:
        start = time.perf_counter()
        save(self, *arguments)
        stalls.append(time.perf_counter() - start)

    Checkpoints.save = timed  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as name:
        data, out = Path(name) / "data", Path(name) / "run"
        write_chains(data, np.random.default_rng(0))
        default = compose_config(["+preset=mini", f"data.directory={data}", f"trainer.out={out}"])
        fixed = ["data.valid_split=null", "trainer.log_every=1", f"trainer.steps={steps}"]
        fixed += [f"trainer.checkpoint_every={max(1, steps // 4)}"]
        config = compose_config(
            ["+preset=mini", f"data.directory={data}", f"trainer.out={out}", *fixed, *overrides]
        )
        rate = product_rate()
        train(config)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        rate = (rate + product_rate()) / 2
    lines = lines[2:]  # the first steps load libraries and start workers
    times = np.diff([line["seconds"] for line in lines])
    residues = np.array([line["residues"] for line in lines[1:]])
    step = float(np.median(times))
    return {
        "seconds_per_step": step,
        "residues_per_second": float(residues.sum() / times.sum()),
        "matrix_product_gflops": rate / 1e9,
        "loader_share": float(sum(line["waited_s"] for line in lines[1:]) / times.sum()),
        "checkpoint_stall_steps": statistics.median(stalls) / step,
        "checkpoint_share": statistics.median(stalls) / (default.trainer.checkpoint_every * step),
        "checkpoint_every": default.trainer.checkpoint_every,
    }


def main() -> None:
    """Measure the steps, print them, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options, overrides = parser.parse_known_args()
    found = measure(options.steps, overrides)
    threads = torch.get_num_threads()
    print(f"matrix product {found['matrix_product_gflops']:.0f} GFLOP/s on {threads} threads")
    print(
        f"{found['seconds_per_step']:.2f} s per step, {found['residues_per_second']:.0f} residues per second"
    )
    verdict = "met" if found["loader_share"] < LOADER_AIM else "NOT met"
    print(f"waiting for the loader {found['loader_share']:.2%} of the time (aim {LOADER_AIM:.0%}, {verdict})")
    verdict = "met" if found["checkpoint_share"] < STALL_AIM else "NOT met"
    print(
        f"a checkpoint holds up the loop for {found['checkpoint_stall_steps']:.1%} of a step, "
        f"{found['checkpoint_share']:.3%} of the time with one every {found['checkpoint_every']} steps "
        f"(aim {STALL_AIM:.0%}, {verdict})"
    )
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps(found | machine | {"threads": threads}, indent=1) + "\n")


if __name__ == "__main__":
    main()
