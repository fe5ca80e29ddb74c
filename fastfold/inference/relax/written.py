"""Relaxation of a prediction that stands in a results folder: ``fastfold infer --relax``."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import numpy as np

from fastfold.errors import InputError
from fastfold.inference.output.evaluate import structure_to_protein
from fastfold.inference.output.json_files import lines_json
from fastfold.inference.output.results_folder import PredictionRecord, TargetResults
from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.relax.output import relaxed_mmcif, relaxed_pdb
from fastfold.inference.relax.protocol import relax
from fastfold.protein.io.pdb_writer import PdbLimitError
from fastfold.protein.io.read import read_structure


def relax_written(
    results: TargetResults, record: PredictionRecord, config: RelaxConfig | None = None
) -> tuple[dict[str, str | bytes], dict[str, Any]]:
    """Relax a prediction from its files.

    Args:
        results: The target's.
        record: The prediction, with ``.cif`` and ``_scores.json``.
        config: Settings; AlphaFold's by default.

    Returns:
        The files to add by their endings: ``_relaxed.pdb`` (if it fits), ``_relaxed.cif``, both only if the minimiser
        came to a structure, and ``_scores.json`` with ``relaxation``, the record of it. And that record; where the
        force field cannot take the structure it says so.

    Raises:
        ConfigError: The platform does not work here, or OpenMM is not installed.
        OutputError: There are no atoms, or a position is not finite.
    """
    scores = json.loads(results.path(record, "_scores.json").read_text())
    files: dict[str, str | bytes] = {}
    try:
        result = relax(structure_to_protein(read_structure(results.path(record, ".cif"))), config)
    except InputError as error:
        found: dict[str, Any] = {"relaxed": False, "reason": str(error)}
    else:
        found = result.to_dict()
        if result.minimized:
            title = f"Predicted structure of {results.stem[:100]} by {scores['model'][:100]}"
            with contextlib.suppress(PdbLimitError):  # as the structure itself, which is in .cif alone
                files["_relaxed.pdb"] = relaxed_pdb(result, title=title)
            files["_relaxed.cif"] = relaxed_mmcif(
                result,
                title=title,
                entry_id=results.stem,
                model_name=scores["model"],
                plddt=np.array(scores["plddt"]),
                ptm=scores["ptm"],
                iptm=scores["iptm"],
                details=f"network {scores['model']}, seed {scores['seed']}, {scores['num_recycles']} recycles",
            )
    files["_scores.json"] = lines_json(scores | {"relaxation": found})
    return files, found


def energy(found: dict[str, Any]) -> float | None:
    """Energy of a relaxed structure in kJ/mol by its record; None for one that does not count as relaxed."""
    value = found.get("energy_after_kj_per_mol")
    return float(value) if found.get("relaxed") and value is not None and math.isfinite(value) else None
