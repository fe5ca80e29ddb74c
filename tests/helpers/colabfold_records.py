"""Queries of which ColabFold 1.6.3 recorded the features that it makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.data.features.assembly import CHAIN_GAP, joined_features, monomer_features, multimer_features
from fastfold.data.msa.msa import ChainMsas
from fastfold.data.targets import Chain
from tests.conftest import REPOSITORY

CARRIED = REPOSITORY / "tests" / "oracles" / "synthetic_colabfold"
"""A few of the records, which the repository holds; the folder of all of them is laid out alike."""


def expected(folder: Path) -> dict[str, Any]:
    """What was recorded, without the arrays."""
    return json.loads((folder / "expected.json").read_text("utf-8"))


def recorded_features(folder: Path, record: dict[str, Any]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The kinds of networks for which ColabFold made features, ``ptm`` and ``multimer``, and the features."""
    for kind, outcome in record["features"].items():
        if "file" in outcome:
            with np.load(folder / outcome["file"], allow_pickle=False) as file:
                yield kind, {name: file[name] for name in file.files}


def our_features(
    kind: str, chains: tuple[Chain, ...], alignments: list[ChainMsas], *, is_complex: bool
) -> dict[str, np.ndarray]:
    """Our features in ColabFold's form, where the index does not jump and chains count from zero."""
    if kind == "multimer":
        return multimer_features(chains, alignments)
    if not is_complex:
        return monomer_features(chains[0], alignments[0][0])
    found = joined_features(chains, alignments)
    chain = found["asym_id"] - 1
    starts = np.flatnonzero(np.diff(chain, prepend=-1))
    jumps = np.diff(found["residue_index"])[starts[1:] - 1]
    assert (jumps == CHAIN_GAP + 1).all()
    return found | {
        "asym_id": chain,
        "residue_index": found["residue_index"] - found["residue_index"][starts][chain],
    }


def assert_equal_features(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], case: str) -> None:
    """All recorded arrays but those of templates and names of single chains, which we have no use for."""
    ours = ours | {"sequence": np.array([ours["sequence"].tobytes()])} if "sequence" in ours else ours
    missing = {name for name in theirs if name not in ours}
    if "entity_id" in theirs:
        assert not missing, case
    else:
        assert missing <= {"domain_name", "asym_id", "msa_species_identifiers"} | {
            name for name in theirs if name.startswith("template_")
        }, case
    for name, value in theirs.items():
        if name in missing or (name.startswith("template_") and "entity_id" not in theirs):
            continue
        if name == "deletion_mean":
            np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=0, err_msg=f"{case} {name}")
        else:
            np.testing.assert_array_equal(ours[name], value, err_msg=f"{case} {name}")
