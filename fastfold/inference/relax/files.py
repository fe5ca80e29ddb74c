"""Relax structure files, for ``fastfold relax``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fastfold._version import __version__
from fastfold.errors import OutputError
from fastfold.inference.output.json_files import lines_json
from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.relax.protocol import relax
from fastfold.inference.relax.result import RelaxResult, relaxed_mmcif, relaxed_pdb
from fastfold.protein.io.pdb_writer import PdbLimitError
from fastfold.protein.io.read import read_user_structure, structure_name
from fastfold.protein.labels import author_names
from fastfold.protein.structure import structure_to_protein
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic

_log = logging.getLogger(__name__)

SCHEMA_VERSION = 1  #: Version of ``_relax.json``; raised when a key is removed or changes its meaning
_SUFFIXES = {"pdb": "_relaxed.pdb", "cif": "_relaxed.cif", "record": "_relax.json"}


def result_paths(path: Path, out: Path | None = None) -> dict[str, Path]:
    """Return the paths of a file's results in a folder, or its own: ``pdb``, ``cif`` and ``record``."""
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

    Files are named ``<stem>_relaxed.pdb``, ``<stem>_relaxed.cif`` and ``<stem>_relax.json``. Chains, residue numbers
    and B-factors are those of the input. Waters, ligands and nucleic acids are left out, as in
    :func:`~fastfold.protein.io.read.read_user_structure`. If the minimiser fails, only the record is written. Equal
    inputs give equal structure files on the Reference platform and on one thread of the CPU; the records differ in
    ``seconds``.

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
    }
    contents["record"] = lines_json(record | result.to_dict())
    for kind, text in contents.items():
        write_atomic(paths[kind], text)
    for kind in paths.keys() - contents.keys():
        paths[kind].unlink(missing_ok=True)  # of an earlier run, without its record
    return result, {kind: paths[kind] for kind in contents}
