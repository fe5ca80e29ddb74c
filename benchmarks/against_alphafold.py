"""Evoformer blocks and a monomer of FastFold against AlphaFold's and OpenFold's programs, on this machine's processor.

Usage: python benchmarks/against_alphafold.py --alphafold DIR --python PROGRAM [--openfold DIR] [--cases 64x64 ...]

DIR is a checkout of AlphaFold (https://github.com/google-deepmind/alphafold), PROGRAM a Python with jax, dm-haiku and
ml_collections, in an environment of its own. With a checkout of OpenFold, blocks run by its modules too, which need
scipy. Nothing of them is installed or copied. Programs run on the same number of cores and take turns; the best of all
rounds counts. ``--processor-time`` counts the time that each process computes on all its threads, which other programs
disturb less.

AlphaFold's forward passes run with each size of sub-batches, of which the fastest counts; its training has none.
Weights and inputs are random, because they do not change the time; ``fastfold verify`` compares results. Blocks of all
programs run in float32 and in bfloat16; AlphaFold's monomer has no bfloat16. ``monomer`` has the official number of
blocks, and ``small-monomer`` four, both with 64 rows. ``recycled-monomer`` passes four times. ``deep-monomer`` has the
512 and 1,024 rows of ``model_5``, whose passes take minutes: ``--subbatches 4 --rounds 1 --no-warm-up`` shortens them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from fastfold.cli.process import prepare_environment

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
prepare_environment()  # must precede the import of PyTorch

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.against_openfold import Case, OpenFoldBlocks, randomize  # noqa: E402
from fastfold.data.features.pipeline import featurize  # noqa: E402
from fastfold.data.msa.msa import parse_a3m  # noqa: E402
from fastfold.data.targets import target_from_sequence  # noqa: E402
from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.evoformer.evoformer import EvoformerBlock  # noqa: E402
from fastfold.evoformer.execution import ExecutionPolicy, set_policy  # noqa: E402
from fastfold.evoformer.model import AlphaFold  # noqa: E402
from fastfold.evoformer.precision import parameters_to, set_precision  # noqa: E402
from fastfold.inference.folding.network import keep_freed_memory  # noqa: E402
from fastfold.inference.planning.planner import FOLDING_POLICY  # noqa: E402
from fastfold.kernels.cpu.linear import Products, reduced_products  # noqa: E402
from fastfold.kernels.cpu.products import exact_products  # noqa: E402
from fastfold.protein.residue_constants import restypes  # noqa: E402

C_M, C_Z = 256, 128
SUBBATCHES = (0, 4, 16, 64)  #: Sizes of AlphaFold's sub-batches; 0 for none
PRECISIONS = ("fp32", "bf16-products", "bf16")
PRODUCTS: dict[str, Products] = {"bf16-products": "bf16"}
MONOMER_RESIDUES = 100
Run = Callable[[], float]
clock = time.perf_counter


class Monomer(NamedTuple):
    """Case that is a network."""

    network: str = "model_3"  #: Network without templates
    blocks: int | None = None  #: Number of Evoformer blocks; None for the official number
    rows: int = 64  #: Rows of the alignment
    passes: int = 1  #: Number of passes


MONOMERS = {
    "monomer": Monomer(),
    "small-monomer": Monomer(blocks=4),
    "recycled-monomer": Monomer(passes=4),
    "deep-monomer": Monomer(network="model_5", rows=512 + 1024),
}


def block_inputs(sequences: int, residues: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return random MSA and pair, and masks of ones in the same dtype."""
    torch.manual_seed(0)
    msa, pair = torch.randn(sequences, residues, C_M), torch.randn(residues, residues, C_Z)
    masks = torch.ones(sequences, residues), torch.ones(residues, residues)
    return tuple(x.to(dtype) for x in (msa, pair, *masks))


def our_block(sequences: int, residues: int, precision: str, *, backward: bool) -> Run:
    """Return a timed pass of one block."""
    keep_freed_memory()  # as folds with room do
    block = EvoformerBlock(
        model_config("model_3").model.embeddings_and_evoformer.evoformer, C_M, C_Z, zero_init=False
    ).eval()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    parameters_to(block, dtype)
    msa, pair, *masks = block_inputs(sequences, residues, dtype)

    def forward() -> float:
        set_policy(block, ExecutionPolicy(inplace=True))
        own = msa.clone(), pair.clone()
        with torch.inference_mode(), exact_products(torch.device("cpu")), reduced(precision):
            start = clock()
            block(*own, *masks)
            return clock() - start

    def both() -> float:
        leaves = [x.clone().requires_grad_() for x in (msa, pair)]
        set_policy(block, ExecutionPolicy(keep_projections=True))
        block.zero_grad(set_to_none=True)
        with exact_products(torch.device("cpu")):  # as designs do
            start = clock()
            sum(x.sum() for x in block(*leaves, *masks)).backward()
            return clock() - start

    return both if backward else forward


def their_block(checkout: Path, sequences: int, residues: int, precision: str, *, backward: bool) -> Run:
    """Return a timed pass of one of OpenFold's blocks; in ``bf16`` all parameters are bfloat16."""
    program = OpenFoldBlocks(checkout, Case(1, sequences, residues))
    randomize(program.modules)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    program.modules.to(dtype)
    msa, pair, *masks = block_inputs(sequences, residues, dtype)

    def forward() -> float:
        own = (msa.clone(), pair.clone(), *masks)
        with torch.inference_mode():
            start = clock()
            program.infer(own, pieces=False)  # type: ignore[arg-type]
            return clock() - start

    def both() -> float:
        leaves = [x.clone().requires_grad_() for x in (msa, pair)]
        program.modules.zero_grad(set_to_none=True)
        start = clock()
        outputs = program.train((*leaves, *masks))  # type: ignore[arg-type]
        sum(x.sum() for x in outputs).backward()  # type: ignore[union-attr]
        return clock() - start

    return both if backward else forward


def reduced(precision: str) -> AbstractContextManager[None]:
    """Return the context of products in a precision."""
    return reduced_products(PRODUCTS[precision]) if precision in PRODUCTS else nullcontext()


def monomer_features(monomer: Monomer) -> dict[str, np.ndarray]:
    """Return the features of a random alignment, with a leading axis of passes."""
    random = np.random.default_rng(0)
    rows = ["".join(random.choice(restypes, MONOMER_RESIDUES)) for _ in range(monomer.rows)]
    msa = parse_a3m("".join(f">{number}\n{row}\n" for number, row in enumerate(rows)))
    target = target_from_sequence(rows[0], "random")
    sampler = featurize(target.chains, [([msa], [])], model_config(monomer.network))
    features = sampler.stack(monomer.passes)
    return {**features, "seq_length": np.full(monomer.passes, MONOMER_RESIDUES, np.int32)}


def our_monomer(monomer: Monomer, features: dict[str, np.ndarray], precision: str) -> Run:
    """Return a timed fold by a monomer network."""
    config = model_config(monomer.network)
    if monomer.blocks is not None:
        config.model.embeddings_and_evoformer.evoformer_num_block = monomer.blocks
        config.model.embeddings_and_evoformer.extra_msa_stack_num_block = 1
    torch.manual_seed(0)
    network = set_precision(AlphaFold(config), precision).eval()
    tensors = {name: torch.from_numpy(value) for name, value in features.items()}

    def run() -> float:
        set_policy(network, FOLDING_POLICY)
        with torch.inference_mode(), exact_products(torch.device("cpu")):
            start = clock()
            network(tensors, monomer.passes - 1)
            return clock() - start

    return run


class TheirProgram:
    """Process with AlphaFold's program.

    Raises:
        RuntimeError: The process ended.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: options.threads])
        program = Path(__file__).with_name("alphafold_program.py")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [
                *("taskset", "-c", cores, options.python, program, options.alphafold.resolve()),
                "processor" if options.processor_time else "wall",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"JAX_PLATFORMS": "cpu"},
        )
        self.versions = self._answer()

    def seconds(self, **request: Any) -> float:
        """Run a pass, and return its time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"AlphaFold's program ended (status {self._process.wait()})")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def compare(
    theirs: TheirProgram,
    requests: dict[str, dict[str, Any]],
    runs: dict[str, Run],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Return the best seconds of each program, from rounds in turn; ``requests`` to AlphaFold are by dtype."""
    if options.warm_up:
        for run in runs.values():
            run()
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for dtype, request in requests.items():
            for size in options.subbatches if request.get("pass", "forward") == "forward" else (0,):
                name = f"AlphaFold {dtype}"
                seconds = theirs.seconds(subbatch=size or None, warm_up=options.warm_up, **request)
                best[name] = min(best.get(name, np.inf), seconds)
        for name, run in runs.items():
            best[name] = min(best.get(name, np.inf), run())
    return best


def main() -> None:
    """Print a table of all cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alphafold", type=Path, required=True, metavar="DIR", help="checkout of AlphaFold")
    parser.add_argument("--python", required=True, metavar="PROGRAM", help="Python with jax and dm-haiku")
    parser.add_argument("--openfold", type=Path, metavar="DIR", help="checkout of OpenFold")
    parser.add_argument("--cases", nargs="+", default=["64x64", "128x256", "512x384", "monomer"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--subbatches",
        type=int,
        nargs="+",
        default=SUBBATCHES,
        metavar="SIZE",
        help="sizes of AlphaFold's sub-batches to try; 0 for none",
    )
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS, help="of monomers")
    parser.add_argument(
        "--no-warm-up", action="store_false", dest="warm_up", help="time the first pass after compilation too"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--processor-time", action="store_true", help="for machines with other programs")
    parser.add_argument("--no-backward", action="store_true", help="forward passes only")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    if not (options.alphafold / "alphafold" / "model" / "modules.py").is_file():
        parser.error(f"{options.alphafold} is not a checkout of AlphaFold")
    torch.set_num_threads(options.threads)
    global clock
    clock = time.process_time if options.processor_time else time.perf_counter
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        theirs = TheirProgram(options)
        print(theirs.versions, flush=True)
        try:
            for case in options.cases:
                if case in MONOMERS:
                    monomer = MONOMERS[case]
                    features = monomer_features(monomer)
                    archive = Path(folder) / f"{case}.npz"
                    np.savez(archive, **features)  # type: ignore[arg-type]
                    runs = {
                        f"FastFold {each}": our_monomer(monomer, features, each)
                        for each in options.precisions
                    }
                    network = {
                        "case": "monomer",
                        "network": monomer.network,
                        "blocks": monomer.blocks,
                        "passes": monomer.passes,
                        "features": str(archive),
                    }
                    results[case] = compare(theirs, {"float32": network}, runs, options)
                    print(case, json.dumps(results[case]), os.getloadavg(), flush=True)
                    continue
                sequences, residues = map(int, case.split("x"))
                for name in ("forward", "forward + backward")[: 1 if options.no_backward else 2]:
                    backward = name != "forward"
                    runs = {}
                    for each in ("fp32", "bf16") if backward else PRECISIONS:
                        runs[f"FastFold {each}"] = our_block(sequences, residues, each, backward=backward)
                    for each in ("fp32", "bf16") if options.openfold is not None else ():
                        runs[f"OpenFold {each}"] = their_block(
                            options.openfold, sequences, residues, each, backward=backward
                        )
                    block = {"case": "block", "sequences": sequences, "residues": residues, "pass": name}
                    requests = {dtype: block | {"dtype": dtype} for dtype in ("float32", "bfloat16")}
                    label = f"{case}, {name}"
                    results[label] = compare(theirs, requests, runs, options)
                    print(label, json.dumps(results[label]), os.getloadavg(), flush=True)
        finally:
            theirs.close()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
