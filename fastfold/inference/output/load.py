"""Predictions read back from a folder of results."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.errors import ConfigError, InputError
from fastfold.inference.output.score_files import (
    mapping_of,
    read_pae,
    read_scores,
    residue_numbers,
    scored_names,
)
from fastfold.inference.report.discover import FoundPrediction, find_predictions
from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.interface import ChainConfidence
from fastfold.protein.metrics.interface.scores import pair_keys
from fastfold.protein.structure import structure_to_protein
from fastfold.utils.option_fields import LARGEST, check_path, check_whole


def read_prediction(folder: str | Path, name: str | None = None, *, rank: int = 1) -> dict[str, Any]:
    """Read the fields of a prediction of a folder of results, for :class:`fastfold.Prediction`.

    Positions have the three decimals of files, pLDDT and aligned errors two. Structures after single passes, and
    relaxed ones, are not read.

    Args:
        folder: Folder that ``fastfold infer`` or ``Prediction.save`` wrote to.
        name: Name of the target; may be left out if the folder has one target.
        rank: Place among the target's predictions, from 1.

    Raises:
        ConfigError: The folder has several targets or none of that name, or no prediction of that rank.
        InputError: A file of the prediction is missing or damaged.
    """
    check_path(folder)
    check_whole("rank", rank, 1, LARGEST)
    prediction = _find(Path(folder), name, rank)
    files = dict(prediction.files)
    if ".cif" not in files:
        raise InputError(
            "the prediction has no mmCIF file; fold it again", path=Path(folder) / prediction.stem
        )
    scores = read_scores(files["_scores.json"])
    protein = structure_to_protein(read_structure(files[".cif"]))
    sequences = tuple(scores["sequences"])
    lengths = [len(sequence) for sequence in sequences]
    if [len(one) for one in protein.sequences] != lengths:
        raise InputError("has other chains than the scores file; fold it again", path=files[".cif"])
    names = scored_names(scores)
    pae = max_pae = None
    if "_pae.json" in files:
        pae, max_pae = read_pae(files["_pae.json"], sum(lengths))
    interfaces = mapping_of(scores, "interfaces")
    return {
        "name": scores["name"],
        "sequences": sequences,
        "model_name": scores["model"],
        "is_multimer": scores.get("is_multimer") is True,
        "seed": scores["seed"],
        "sample": scores.get("sample"),
        "num_recycles": int(scores.get("num_recycles", 0)),
        "aatype": protein.aatype,
        "residue_index": residue_numbers(scores) - 1,
        "chain_index": protein.chain_index,
        "atom_positions": protein.atom_positions,
        "atom_mask": protein.atom_mask,
        "plddt": np.array(scores["plddt"], np.float32),
        "pae": pae,
        "max_pae": max_pae,
        "ptm": scores["ptm"],
        "iptm": scores["iptm"],
        "templates": None if scores.get("templates") is None else tuple(scores["templates"]),
        "chain_confidence": _confidence(interfaces, names.chain_ids),
        "representations": _read_arrays(files.get("_representations.npz")),
        "distogram": _read_arrays(files.get("_distogram.npz")),
        "restraints": mapping_of(scores, "restraints") or None,
        "forced_templates": scores.get("forced_templates", ()),
        "given_structure": mapping_of(scores, "given_structure") or None,
        "names": names,
        "no_interface_scores": interfaces.get("reason"),
    }


def _find(folder: Path, name: str | None, rank: int) -> FoundPrediction:
    predictions = find_predictions(folder)
    targets = list(dict.fromkeys(one.target for one in predictions))
    if name is None and len(targets) > 1:
        raise ConfigError(f"{folder} has {len(targets)} targets; give name=, {targets[0]!r} for example")
    chosen = [one for one in predictions if name in (None, one.target, one.scores["name"])]
    ranked = [one for one in chosen if (one.rank or 1) == rank]
    if not ranked:
        what = "no prediction" if not predictions else f"no prediction {name or targets[0]!r} of rank {rank}"
        raise ConfigError(
            f"{folder} has {what}; its targets are {', '.join(map(repr, targets[:5])) or 'none'}"
        )
    return ranked[0]


def _read_arrays(path: Path | None) -> dict[str, np.ndarray] | None:
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError("is not an archive of arrays; fold the prediction again", path=path) from error


def _confidence(interfaces: Mapping[str, Any], names: Sequence[str]) -> ChainConfidence | None:
    """Return the confidence in chains from the scores of a file; None if a part is missing."""
    try:
        number = len(names)
        ptm = [float(interfaces["chains"][name]["ptm"]) for name in names]
        pairs = {score: np.zeros((number, number)) for score in ("iptm", "actifptm")}
        keys = pair_keys(names)
        for i, j in itertools.combinations(range(number), 2):
            pair = interfaces["pairs"][keys[i, j]]
            for score, values in pairs.items():
                values[i, j] = values[j, i] = np.nan if pair[score] is None else float(pair[score])
        has_actifptm = interfaces.get("actifptm") is not None
        if number < 2 or np.isnan(pairs["iptm"]).any():
            return None
        return ChainConfidence(
            ptm=np.array(ptm),
            iptm=pairs["iptm"],
            pair_actifptm=pairs["actifptm"] if has_actifptm else None,
            actifptm=float(interfaces["actifptm"]) if has_actifptm else None,
        )
    except (KeyError, TypeError, ValueError):
        return None
