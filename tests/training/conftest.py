"""A data folder of small helices, and a network small enough to be trained in tests."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.protein import Protein
from fastfold.training import run, trainer
from fastfold.training.logging.profiling import FlopCounter
from fastfold.training.report.report import write_report
from tests.helpers.networks import oracle_arrays

_STEP = {"dropout_rate": 0.05}
NETWORK = {
    "data": {"common": {"max_extra_msa": 64}, "eval": {"max_msa_clusters": 32}},
    "model": {
        "embeddings_and_evoformer": {
            "evoformer_num_block": 1,
            "extra_msa_stack_num_block": 1,
            "msa_channel": 16,
            "pair_channel": 16,
            "seq_channel": 16,
            "extra_msa_channel": 8,
            "evoformer": {
                "msa_row_attention_with_pair_bias": {"num_head": 4, **_STEP},
                "msa_column_attention": {"num_head": 4},
                "outer_product_mean": {"num_outer_channel": 4},
                "triangle_multiplication_outgoing": {"num_intermediate_channel": 16, **_STEP},
                "triangle_multiplication_incoming": {"num_intermediate_channel": 16, **_STEP},
                "triangle_attention_starting_node": _STEP,
                "triangle_attention_ending_node": _STEP,
                "pair_transition": {"num_intermediate_factor": 2},
            },
        },
        "heads": {
            "structure_module": {
                "num_layer": 2,
                "num_channel": 16,
                "num_head": 2,
                "dropout": 0.05,
                "structural_violation_loss_weight": 0.02,
            }
        },
    },
}
"""A small network whose blocks have all of AlphaFold's steps."""


def overrides(tree: Mapping[str, Any], place: str) -> list[str]:
    """Settings of the command line for a tree."""
    return list(_settings(tree, place))


def _settings(tree: Mapping[str, Any], place: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{place}.{key}")
        else:
            yield f"{place}.{key}={value}"


ADAM = [
    "optim=alphafold",
    "optim.warmup_steps=20",
    "optim.decay_after=null",
    "optim.cosine_steps=null",
    "optim.clip=1.0",
]
"""For ``+preset=overfit``: optimizer states that can be sharded, and rates that do not depend on the last step."""

TINY = [
    "+preset=overfit",
    *ADAM,
    "model=model_3_ptm",
    "model.name=mini",
    *overrides(NETWORK, "model.overrides"),
    "data.max_recycles=1",
    "data.valid_split=null",
    "trainer.device=cpu",
    "trainer.validate_recycles=0",
]
"""Overrides of a run that takes milliseconds per step."""


def write_helix(path: Path, residues: int, start: int = 0, *, plddt: float = 90.0) -> None:
    """A chain of the recorded helix as a PDB file, packed if the name says so."""
    features = oracle_arrays("synthetic_monomer", "features")
    part = slice(start, start + residues)
    mask = features["all_atom_mask"][0][part]
    protein = Protein(
        atom_positions=features["all_atom_positions"][0][part],
        atom_mask=mask,
        aatype=features["aatype"][0][part],
        residue_index=np.arange(1, len(mask) + 1),
        chain_index=np.zeros(len(mask)),
        b_factors=np.full(mask.shape, plddt),
    )
    text = to_pdb(protein).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_data(folder: Path) -> Path:
    """Four chains to train on and two to validate on."""
    for number, residues in enumerate((12, 16, 20, 24)):
        write_helix(folder / "train" / f"helix{number}.pdb.gz", residues, number)
    for number, residues in enumerate((14, 18)):
        write_helix(folder / "valid" / f"other{number}.pdb", residues, 4 + number)
    return folder


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """The chains of :func:`write_data`."""
    return write_data(tmp_path / "data")


@contextmanager
def without_report() -> Iterator[None]:
    """Runs inside neither write a report nor count operations, which take longer than their steps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "write_report", lambda out: out / "report" / "report.md")
        patched.setattr(trainer, "FlopCounter", lambda *, enabled: FlopCounter(enabled=False))
        yield


@pytest.fixture(autouse=True, scope="module")
def no_report() -> Iterator[None]:
    """Runs in this process are cheap, in fixtures of a module too, unless a test asks for a report."""
    with without_report():
        yield


@pytest.fixture
def with_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that looks at the report or the speed of a run in this process."""
    monkeypatch.setattr(run, "write_report", write_report)
    monkeypatch.setattr(trainer, "FlopCounter", FlopCounter)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small networks are fastest so, and the same sums come out everywhere, in fixtures of a module too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
