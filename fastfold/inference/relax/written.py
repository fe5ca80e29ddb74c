"""Relax predictions of a results folder: ``fastfold infer --relax``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.errors import InputError
from fastfold.inference.config import FolderFormat
from fastfold.inference.output.json_files import lines_json
from fastfold.inference.output.prediction import prediction_title, run_details
from fastfold.inference.output.results_folder import PredictionRecord, Ranking, ResultsFolder, TargetResults
from fastfold.inference.output.written_scores import read_scores, residue_numbers
from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.relax.protocol import relax
from fastfold.inference.relax.result import relaxed_mmcif, relaxed_pdb
from fastfold.protein.io.pdb_writer import PdbLimitError
from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import structure_to_protein


def relax_written(
    results: TargetResults,
    record: PredictionRecord,
    config: RelaxConfig | None = None,
) -> tuple[dict[str, str | bytes], dict[str, Any]]:
    """Relax a prediction from its ``.cif`` and ``_scores.json``.

    Errors are those of :func:`~fastfold.inference.relax.protocol.relax`, but the record tells if the force field does
    not support the structure.

    Returns:
        Files to add by their endings, and the record of the relaxation. The files are ``_relaxed.pdb`` (if the
        structure fits the format), ``_relaxed.cif``, both only if the minimiser succeeded, and ``_scores.json`` with
        the record as ``relaxation``.
    """
    scores = read_scores(results.path(record, "_scores.json"))
    files: dict[str, str | bytes] = {}
    try:
        protein = structure_to_protein(read_structure(results.path(record, ".cif")))
        protein = replace(protein, residue_index=residue_numbers(scores))
        result = relax(protein, config, continuous=True)
    except InputError as error:
        found: dict[str, Any] = {"relaxed": False, "reason": str(error)}
    else:
        found = result.to_dict()
        if result.minimized:
            title = prediction_title(results.stem, scores["model"])
            with contextlib.suppress(PdbLimitError):  # the unrelaxed structure has only .cif, too
                files["_relaxed.pdb"] = relaxed_pdb(result, title=title)
            files["_relaxed.cif"] = relaxed_mmcif(
                result,
                title=title,
                entry_id=results.stem,
                model_name=scores["model"],
                plddt=np.array(scores["plddt"]),
                ptm=scores["ptm"],
                iptm=scores["iptm"],
                details=run_details(scores["model"], scores["seed"], scores.get("num_recycles")),
            )
    files["_scores.json"] = lines_json(scores | {"relaxation": found})
    return files, found


def relax_results(
    results: TargetResults,
    records: Iterable[PredictionRecord],
    ranking: Ranking,
    config: RelaxConfig | None = None,
) -> Iterator[tuple[PredictionRecord, str, bool]]:
    """Relax the predictions that are not relaxed yet, and add the files to each.

    Predictions that another process works on are skipped. Errors are those of
    :func:`~fastfold.inference.relax.protocol.relax`, and of written files.

    Yields:
        Each processed prediction, its outcome in words, and True if it is relaxed.
    """
    for record in records:
        if "relaxation" in record.scores:
            continue
        with results.claimed(record.id) as mine:
            if not mine:
                continue
            files, found = relax_written(results, record, config)
            energy = found.get("energy_after_kj_per_mol") if found["relaxed"] else None
            scores = {**record.scores, "relaxation": found["relaxed"], "relaxed_energy": energy}
            added = results.add(record.id, record.key, files, scores, ranking)
        yield added, _in_words(found), found["relaxed"]


def relax_in_folder(
    folder: Path,
    output_format: FolderFormat,
    target: tuple[str, Path],
    predictions: Sequence[str],
    ranking: Ranking,
    config: RelaxConfig,
) -> list[tuple[str, str, bool]]:
    """Relax some predictions of a target, in any process; arguments and result can be pickled.

    The target is the stem of its files, and the folder of its records. Predictions are given by their identifiers. For
    each, the result is its key, its outcome in words, and True if it is relaxed; errors are those of
    :func:`relax_results`.
    """
    results = TargetResults(ResultsFolder(folder, output_format=output_format), *target)
    records = [record for record in results.records() if record.id in predictions]
    return [
        (record.key, outcome, is_relaxed)
        for record, outcome, is_relaxed in relax_results(results, records, ranking, config)
    ]


def _in_words(found: Mapping[str, Any]) -> str:
    if not found["relaxed"]:
        return f"warning: not relaxed: {found['reason']}"
    return (
        f"relaxed from {found['energy_before_kj_per_mol']:,.0f} to {found['energy_after_kj_per_mol']:,.0f} kJ/mol, "
        f"heavy atoms moved by {found['heavy_atom_rmsd_angstrom']:.2f} Å, {found['seconds']:.0f} s on "
        f"{found['platform']}"
    )
