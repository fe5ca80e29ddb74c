"""Relaxation of structure files: what ``fastfold relax`` does with each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fastfold._version import __version__
from fastfold.errors import OutputError
from fastfold.inference.output.evaluate import structure_to_protein
from fastfold.inference.output.json_files import lines_json
from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.relax.output import relaxed_mmcif, relaxed_pdb
from fastfold.inference.relax.protocol import relax
from fastfold.inference.relax.result import RelaxResult
from fastfold.protein.io.pdb_writer import PdbLimitError
from fastfold.protein.io.read import read_user_structure, structure_name
from fastfold.protein.labels import author_names
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic

_log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Version of ``_relax.json``; raised when a key changes its meaning or goes."""
_SUFFIXES = {"pdb": "_relaxed.pdb", "cif": "_relaxed.cif", "record": "_relax.json"}


def result_paths(path: Path, out: Path | None = None) -> dict[str, Path]:
    """Where the results of a file go: ``pdb``, ``cif`` and ``record``.

    Args:
        path: The structure file.
        out: Folder of the results; by default the one of the file.
    """
    folder = path.parent if out is None else out
    return {kind: folder / f"{structure_name(path)}{suffix}" for kind, suffix in _SUFFIXES.items()}


def relax_file(
    path: Path,
    out: Path | None = None,
    config: RelaxConfig | None = None,
    *,
    overwrite: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> tuple[RelaxResult, dict[str, Path]]:
    """Relax the protein chains of a structure file and write the result, each file atomically.

    Files are called ``<stem>_relaxed.pdb``, ``<stem>_relaxed.cif`` and ``<stem>_relax.json``. Chains, residue numbers
    and B-factors are those of the input; waters, ligands and nucleic acids are left out, as
    :func:`~fastfold.protein.io.read.read_user_structure` does. Of a structure that the minimiser failed on, the record
    alone is written. The same input gives the same structure files on the Reference platform and on one thread of the
    CPU; the record differs by its ``seconds``.

    Args:
        path: A PDB or mmCIF file, plain or packed (``.gz``).
        out: Folder of the results; by default the one of the file.
        config: Settings; AlphaFold's by default.
        overwrite: Whether results that are there are replaced.
        on_progress: Called every ten seconds with a line about the work.

    Returns:
        The relaxation, and the paths that were written: ``pdb`` (if it fits), ``cif`` and ``record``.

    Raises:
        InputError: The file cannot be read, or holds what the force field cannot take.
        OutputError: A result is there already, or a file cannot be written.
        ConfigError: The platform does not work here, or OpenMM is not installed.
    """
    config = config or RelaxConfig()
    paths = result_paths(path, out)
    there = [str(file) for file in paths.values() if file.exists()]
    if there and not overwrite:
        raise OutputError(
            f"{path}: not relaxed, because {there[0]!r} exists; use --overwrite (in Python overwrite=True), or "
            "another output folder"
        )
    structure = read_user_structure(path)
    prepare_output_directory(paths["record"].parent)
    names = author_names(structure)
    result = relax(structure_to_protein(structure), config, names=names, on_progress=on_progress)

    contents: dict[str, str] = {}
    title = f"Structure {structure.name[:100]}"
    if result.minimized:
        try:
            contents["pdb"] = relaxed_pdb(result, title=title, names=names)
        except PdbLimitError as error:
            _log.warning("%s: no PDB file is written: %s", path, error)
        contents["cif"] = relaxed_mmcif(result, title=title, entry_id=structure.name, names=names)
    record = {
        "schema_version": SCHEMA_VERSION,
        "file": path.name,
        "fastfold_version": __version__,
        "settings": asdict(config),
        "notes": list(structure.warnings),
        **result.to_dict(),
    }
    contents["record"] = lines_json(record)
    for kind, text in contents.items():
        write_atomic(paths[kind], text)
    for kind in paths.keys() - contents.keys():
        paths[kind].unlink(missing_ok=True)  # of an earlier run, which the record no longer describes
    return result, {kind: paths[kind] for kind in contents}
