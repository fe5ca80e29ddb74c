"""Predictions in reduced precision against float32: structures in Å, pLDDT and aligned errors.

Usage: python benchmarks/precision_accuracy.py [--networks mini official] [--passes 1 4 21] [--targets ubiquitin 1igd]

``mini`` folds ubiquitin and records of ``examples/proteins.fasta`` without alignments. ``official`` is ``model_1_ptm``
with random parameters and ``--blocks`` Evoformer blocks of official width, which folds a random sequence: its
structures mean nothing, but all operators have their official sizes. Each precision is forced for all calls. ``int8 in
8 bits`` runs as on a processor without units for bfloat16; with them, ``int8`` is ``bf16-products``.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import numpy as np  # noqa: E402
import torch  # noqa: E402

import fastfold  # noqa: E402
from fastfold.data.queries.fasta import read_fasta  # noqa: E402
from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.evoformer.model import AlphaFold  # noqa: E402
from fastfold.evoformer.precision import set_precision  # noqa: E402
from fastfold.inference.output.prediction import Prediction  # noqa: E402
from fastfold.protein.metrics.tm_score import rmsd  # noqa: E402
from fastfold.protein.residue_constants import restypes  # noqa: E402
from fastfold.utils.machine import processor_name  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"
CA = 1  #: Index of the CA in a residue's atoms
PRECISIONS = ("bf16-products", "bf16", "int8 in 8 bits")


@contextmanager
def without_units() -> Iterator[None]:
    """Multiply as a processor without units for bfloat16 does."""
    with mock.patch("fastfold.kernels.cpu.linear.multiplies_bfloat16", return_value=False):
        yield


def sequences() -> dict[str, str]:
    """Return the sequences of small proteins by their names."""
    records = read_fasta(REPOSITORY / "examples" / "proteins.fasta")
    return {"ubiquitin": UBIQUITIN} | {record.name: record.chains[0].sequence for record in records}


def network_of(name: str, blocks: int) -> AlphaFold:
    """Return ``mini``, or a network of official width with random parameters."""
    if name == "mini":
        return fastfold.load_model("mini", device="cpu")
    config = model_config("model_1_ptm")
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block, trunk.extra_msa_stack_num_block = blocks, 1
    config.model.global_config.zero_init = False
    torch.manual_seed(0)
    model = AlphaFold(config).eval()
    model.name = "official"
    return model


def fold(model: AlphaFold, precision: str, sequence: str, passes: int) -> Prediction:
    """Fold a sequence in a precision, without an alignment."""
    network = set_precision(copy.deepcopy(model), precision.split()[0], least_work=0)
    units: AbstractContextManager[None] = without_units() if precision.endswith("bits") else nullcontext()
    with units:
        return fastfold.predict(sequence, network, num_recycles=passes - 1, pae=True)


def row(exact: Prediction, reduced: Prediction) -> str:
    """Return the differences of a prediction from that in float32 as cells of a table."""
    positions = [torch.as_tensor(np.asarray(x.atom_positions)[:, CA]).double() for x in (reduced, exact)]
    distance = float(rmsd(positions[0], positions[1], torch.ones(len(positions[0]), dtype=torch.float64)))
    plddt = [np.asarray(x.plddt, np.float64) for x in (reduced, exact)]
    assert reduced.pae is not None
    assert exact.pae is not None
    pae = np.abs(np.asarray(reduced.pae, np.float64) - np.asarray(exact.pae, np.float64))
    return (
        f"{distance:.2f} | {plddt[1].mean():.1f} | {plddt[0].mean():.1f} | "
        f"{np.abs(plddt[0] - plddt[1]).max():.1f} | {pae.mean():.2f} | {pae.max():.2f}"
    )


def main() -> None:
    """Print a table of all networks, passes and precisions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=["mini", "official"], choices=["mini", "official"])
    parser.add_argument("--passes", nargs="+", type=int, default=[1, 4, 21])
    parser.add_argument("--targets", nargs="+", default=["ubiquitin"], choices=sequences(), help="of mini")
    parser.add_argument("--blocks", type=int, default=4, help="Evoformer blocks of official width")
    parser.add_argument("--residues", type=int, default=48, help="residues of the random sequence")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    letters = "".join(np.random.default_rng(0).choice(restypes, options.residues))
    print(
        "| network | target | passes | precision | CA RMSD, Å | pLDDT, float32 | pLDDT | largest difference | "
        "PAE, mean difference, Å | largest, Å |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for name in options.networks:
        model = network_of(name, options.blocks)
        known = {each: sequences()[each] for each in options.targets}
        for target, sequence in (known if name == "mini" else {"random": letters}).items():
            for passes in options.passes:
                exact = fold(model, "fp32", sequence, passes)
                for precision in PRECISIONS:
                    cells = row(exact, fold(model, precision, sequence, passes))
                    print(f"| {name} | {target} | {passes} | `{precision}` | {cells} |", flush=True)
    print(f"\n{processor_name()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
