"""Relax structure files (``fastfold relax``), and predictions of a results folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfold._version import __version__
from fastfold.data.templates.custom import structures_inside
from fastfold.errors import InputError, OutputError
from fastfold.inference.config import FolderFormat
from fastfold.inference.output.prediction import prediction_title, run_details
from fastfold.inference.output.results_folder import PredictionRecord, Ranking, ResultsFolder, TargetResults
from fastfold.inference.output.score_files import (
    lines_json,
    read_pae,
    read_scores,
    residue_numbers,
    scored_names,
)
from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.relax.protocol import relax
from fastfold.inference.relax.result import RelaxResult, relaxed_mmcif, relaxed_pdb
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import RELAXATION, read_logged
from fastfold.protein.io.pairwise_metric import has_pairwise_metric
from fastfold.protein.io.pdb_writer import PdbLimitError
from fastfold.protein.io.read import log_warnings, read_structure, structure_name
from fastfold.protein.io.records import is_modified
from fastfold.protein.labels import author_names
from fastfold.protein.structure import Structure, structure_to_protein
from fastfold.utils.atomic_files import output_error, prepare_output_directory, write_atomic
from fastfold.utils.foreign_text import first_few, json_object_or_none

_log = logging.getLogger(__name__)

SCHEMA_VERSION = 1  #: Version of ``_relax.json``; raised when a key is removed or changes its meaning
_SHOWN = 10  #: Modified residues that a note names
_SUFFIXES = {"pdb": "_relaxed.pdb", "cif": "_relaxed.cif", "record": "_relax.json"}


def result_paths(path: Path, out: Path | None = None) -> dict[str, Path]:
    """Return the paths of a file's results in a folder, or its own: ``pdb``, ``cif`` and ``record``."""
    folder = path.parent if out is None else out
    return {kind: folder / f"{structure_name(path)}{suffix}" for kind, suffix in _SUFFIXES.items()}


def structures_to_relax(paths: Iterable[Path]) -> list[Path]:
    """Return files, with each folder replaced by its structures that are not relaxed, if it has any.

    Raises:
        InputError: A folder has no structure.
    """
    files: list[Path] = []
    for path in paths:
        inside = structures_inside(path) if path.is_dir() else [path]
        files += [file for file in inside if not structure_name(file).endswith("_relaxed")] or inside
    return files


def relax_file(
    path: Path,
    out: Path | None = None,
    config: RelaxConfig | None = None,
    *,
    overwrite: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> tuple[RelaxResult, dict[str, Path]]:
    """Relax the protein chains of a structure file and write the result, each file atomically.

    Files are named ``<stem>_relaxed.pdb``, ``<stem>_relaxed.cif`` and ``<stem>_relax.json``. Chains, residue numbers
    and B-factors are those of the input. Waters, ligands and nucleic acids are left out, as in
    :func:`~fastfold.protein.io.observed.read_observed`. If the minimiser fails, only the record is written. Results of
    an interrupted run are made again. Equal inputs give equal structures on the Reference platform and on one thread of
    the CPU.

    Args:
        path: PDB or mmCIF file, plain or compressed (``.gz``).
        out: Folder of the results; None for the folder of the file.
        config: Settings; AlphaFold's by default.
        overwrite: Replace existing results.
        on_progress: Called every ten seconds with a progress line.

    Returns:
        Relaxation, and the written paths: ``pdb`` (if the structure fits the format), ``cif`` and ``record``.

    Raises:
        InputError: The file cannot be read, or the force field does not support its content.
        OutputError: A result exists already, or a file cannot be written.
        ConfigError: The platform does not work, or OpenMM is not installed.

    Example:
        >>> import fastfold
        >>> from pathlib import Path
        >>> from fastfold.inference.relax import relax_file
        >>> _ = Path("query.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> result, files = relax_file(Path("query.pdb"))
        >>> sorted(path.name for path in files.values())
        ['query_relax.json', 'query_relaxed.cif', 'query_relaxed.pdb']
    """
    config = config or RelaxConfig()
    paths = result_paths(path, out)
    there = [str(file) for file in paths.values() if file.exists()]
    if there and not overwrite and not _is_interrupted(paths):
        raise OutputError(
            f"{path}: not relaxed, because {there[0]!r} exists; use `overwrite=True`, or "
            "another output folder"
        )
    structure = read_logged(path, RELAXATION, whole=True)
    prepare_output_directory(paths["record"].parent)
    notes = _changes(structure)
    log_warnings(notes, path)
    names = author_names(structure)
    result = relax(structure_to_protein(structure), config, names=names, on_progress=on_progress)

    # In the order of writing, so that a record without the mmCIF file tells of a run that was interrupted.
    record = {"schema_version": SCHEMA_VERSION, "file": path.name, "fastfold_version": __version__}
    record |= {"settings": asdict(config), "notes": [*structure.warnings, *notes], **result.to_dict()}
    contents: dict[str, str] = {"record": lines_json(record)}
    title = f"Structure {structure.name[:100]}"
    if result.minimized:
        try:
            contents["pdb"] = relaxed_pdb(result, title=title, names=names)
        except PdbLimitError as error:
            _log.warning("%s: no PDB file is written: %s", path, error)
        contents["cif"] = relaxed_mmcif(result, title=title, entry_id=structure.name, names=names)
    try:
        for kind in ("cif", "pdb"):
            paths[kind].unlink(missing_ok=True)  # of an earlier run
    except OSError as error:
        raise output_error(paths["record"].parent, "write to", error) from error
    for kind, text in contents.items():
        write_atomic(paths[kind], text)
    return result, {kind: paths[kind] for kind in contents}


def _is_interrupted(paths: Mapping[str, Path]) -> bool:
    """Return True if a record tells of a structure that was not written to the end."""
    record = json_object_or_none(paths["record"]) or {}
    return record.get("energy_after_kj_per_mol") is not None and not paths["cif"].exists()


def relax_written(
    results: TargetResults, record: PredictionRecord, config: RelaxConfig | None = None
) -> tuple[dict[str, str | bytes], dict[str, Any]]:
    """Relax a prediction from its ``.cif`` and ``_scores.json``.

    Returns:
        Files to add by their endings, and the record, also of a structure that the force field does not support. The
        files are ``_relaxed.pdb`` (if the structure fits the format), ``_relaxed.cif``, both only if the minimiser
        succeeded, and ``_scores.json`` with the record as ``relaxation``.
    """
    scores = read_scores(results.path(record, "_scores.json"))
    files: dict[str, str | bytes] = {}
    try:
        protein = structure_to_protein(read_structure(results.path(record, ".cif")))
        if len(protein.sequences) < len(scores["sequences"]):
            raise InputError(
                "a chain has only unknown residues (X), and no atoms; fold the others without it, or relax its .cif "
                "file with fastfold relax"
            )
        protein = replace(protein, residue_index=residue_numbers(scores))
        names = scored_names(scores)
        result = relax(protein, config, continuous=True, names=names)
    except InputError as error:
        outcome: dict[str, Any] = {"relaxed": False, "reason": str(error)}
    else:
        outcome = result.to_dict()
        if result.minimized:
            title = prediction_title(scores["name"], scores["model"])
            with contextlib.suppress(PdbLimitError):  # the unrelaxed structure has only .cif, too
                files["_relaxed.pdb"] = relaxed_pdb(result, title=title, names=names)
            files["_relaxed.cif"] = relaxed_mmcif(
                result,
                title=title,
                entry_id=results.stem,
                names=names,
                model_name=scores["model"],
                is_multimer=scores.get("is_multimer") is True,
                plddt=np.array(scores["plddt"]),
                pae=_pae_in_cif(results, record, len(protein)),
                ptm=scores["ptm"],
                iptm=scores["iptm"],
                details=run_details(scores["model"], scores["seed"], scores.get("num_recycles")),
            )
    files["_scores.json"] = lines_json(scores | {"relaxation": outcome})
    return files, outcome


def _pae_in_cif(results: TargetResults, record: PredictionRecord, residues: int) -> np.ndarray | None:
    """Return the aligned errors ``[N, N]`` if the file of the unrelaxed structure has them; else None."""
    if "_pae.json" not in record.files or not has_pairwise_metric(results.path(record, ".cif")):
        return None
    return read_pae(results.path(record, "_pae.json"), residues)[0]


def relax_results(
    results: TargetResults,
    records: Iterable[PredictionRecord],
    ranking: Ranking,
    config: RelaxConfig | None = None,
) -> Iterator[tuple[PredictionRecord, str, bool]]:
    """Relax the predictions that are not relaxed yet, except those of other processes, and add the files to each.

    Errors are those of :func:`~fastfold.inference.relax.protocol.relax`, and of written files.

    Yields:
        Each processed prediction, its outcome in words, and True if it is relaxed.
    """
    for record in records:
        if "relaxation" in record.scores:
            continue
        with results.claimed(record.id) as mine:
            if not mine:
                continue
            files, outcome = relax_written(results, record, config)
            energy = outcome.get("energy_after_kj_per_mol") if outcome["relaxed"] else None
            scores = {**record.scores, "relaxation": outcome["relaxed"], "relaxed_energy": energy}
            added = results.add(record.id, record.key, files, scores, ranking)
        yield added, _in_words(outcome), outcome["relaxed"]


def relax_in_folder(
    folder: Path,
    output_format: FolderFormat,
    target: tuple[str, Path],
    predictions: Sequence[str],
    ranking: Ranking,
    config: RelaxConfig,
) -> list[tuple[str, str, bool]]:
    """Relax some predictions of a target, in any process, with arguments and results that can be pickled.

    The target is the stem of its files, and the folder of its records. For each prediction, given by its identifier,
    the result is its key, and the outcome as in :func:`relax_results`.
    """
    results = TargetResults(ResultsFolder(folder, output_format=output_format), *target)
    records = [record for record in results.records() if record.id in predictions]
    return [
        (record.key, outcome, is_relaxed)
        for record, outcome, is_relaxed in relax_results(results, records, ranking, config)
    ]


def _changes(structure: Structure) -> list[str]:
    """Return a sentence for residues of the file that the relaxed structure lacks, or has as another type."""
    changes = []
    if structure.left_out:
        changes.append(f"Left out, since only protein chains are relaxed: {', '.join(structure.left_out)}.")
    modified = [
        f"{name} {number} of chain {chain.chain_id} as {rc.restype_1to3[letter]}"
        for chain in structure.chains
        for letter, name, number in zip(
            chain.sequence, chain.residue_names, chain.author_numbers, strict=False
        )
        if letter in rc.restype_1to3 and is_modified(name, letter)
    ]
    if modified:
        changes.append(f"Modified residues are relaxed as standard ones: {first_few(modified, _SHOWN)}.")
    return changes


def _in_words(outcome: Mapping[str, Any]) -> str:
    if not outcome["relaxed"]:
        return f"warning: not relaxed: {outcome['reason']}"
    return (
        f"relaxed from {outcome['energy_before_kj_per_mol']:,.0f} to {outcome['energy_after_kj_per_mol']:,.0f} kJ/mol, "
        f"heavy atoms moved by {outcome['heavy_atom_rmsd_angstrom']:.2f} Å, {outcome['seconds']:.0f} s on "
        f"{outcome['platform']}"
    )
