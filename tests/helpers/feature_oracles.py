"""Official features for the tests: reading them, and finding out which rows the official run drew."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from fastfold.data.features.transforms import Alignment, RandomDraw
from fastfold.protein import residue_constants as rc
from tests.conftest import REPOSITORY, require_shared

SYNTHETIC = ("synthetic_monomer", "synthetic_multimer")


def oracle_dir(name: str) -> Path:
    """Folder of an oracle: in the repository or beside the checkout (the test is skipped without)."""
    return REPOSITORY / "tests" / "oracles" / name if name in SYNTHETIC else require_shared("oracles", name)


def load(name: str, file: str = "features.npz") -> dict[str, np.ndarray]:
    """All arrays of an oracle's file."""
    with np.load(oracle_dir(name) / file, allow_pickle=False) as data:
        return {key: data[key] for key in data.files}


def load_config(name: str) -> ConfigDict:
    """An oracle's config tree."""
    return ConfigDict(json.loads((oracle_dir(name) / "config.json").read_text()))


def official_draw(alignment: Alignment, official: dict[str, np.ndarray]) -> RandomDraw:
    """The draw that the official program must have made, from one iteration of its monomer features."""
    rows = {row.tobytes(): number for number, row in enumerate(alignment.msa)}
    assert len(rows) == len(alignment.msa), "rows must be unique for this to work"

    def find(msa: np.ndarray) -> np.ndarray:
        return np.array([rows[row.tobytes()] for row in msa.astype(np.uint8)])

    clusters = find(official["true_msa"])
    kept = find(official["extra_msa"][official["extra_msa_row_mask"] > 0])
    others = np.setdiff1d(np.arange(len(rows)), [*clusters, *kept])
    return RandomDraw(
        clusters=clusters,
        extra=np.concatenate([kept, others]),
        num_extra=len(kept),
        masked=official["bert_mask"] > 0,
        msa=np.argmax(official["msa_feat"][..., :23], axis=-1).astype(np.uint8),
    )


def raw_templates(merged: dict[str, np.ndarray], residues: slice) -> dict[str, np.ndarray]:
    """A chain's raw template features from the merged features of its complex."""
    number = int(merged["num_templates"])
    to_hhblits = np.argsort(rc.hhblits_id_to_restype)
    return {
        "template_aatype": np.eye(22)[to_hhblits[merged["template_aatype"][:number, residues]]],
        "template_all_atom_positions": merged["template_all_atom_positions"][:number, residues],
        "template_all_atom_masks": merged["template_all_atom_mask"][:number, residues],
        "template_sum_probs": np.ones((number, 1)),
    }
