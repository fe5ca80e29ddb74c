"""Targets of structure files, whose chains a network scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastfold._version import __version__
from fastfold.data.targets import FoundTarget, Target, make_chains, safe_stem, unique_targets
from fastfold.data.templates.custom import structures_inside
from fastfold.data.templates.whole.given import GivenStructure, Use
from fastfold.errors import InputError
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.read import named_protein, read_objects, read_structure, structure_name
from fastfold.protein.residue_constants import atom_order
from fastfold.protein.structure import Structure
from fastfold.utils.atomic_files import write_atomic


def write_objects(inputs: Sequence[Any], folder: Path) -> list[Path]:
    """Write the structures of a list that are objects into a folder, as mmCIF; return the paths of all.

    The folder is created if needed. A ConfigError names an input of another type, an InputError one without protein.
    """
    paths = []
    for source in read_objects(inputs):
        if isinstance(source, Structure):
            protein, names = named_protein(source)
            text = to_modelcif(
                protein,
                entry_id=source.name,
                title=f"Structure {source.name[:100]}",
                software_version=__version__,
                model_name="given",
                plddt=None,
                names=names,
            )
            folder.mkdir(parents=True, exist_ok=True)
            source = folder / f"{safe_stem(source.name)}.cif"
            write_atomic(source, text)
        paths.append(source)
    return paths


def structure_targets(
    inputs: Sequence[Path], use: Use = "template", shows_targets: bool = False, searches: bool = False
) -> tuple[list[Target], list[InputError]]:
    """Read structure files, and folders of them, as targets; return an error for each unreadable file as well.

    Without searches the network sees the sequences alone. ``use`` and ``shows_targets`` are those of
    :class:`~fastfold.data.templates.whole.given.GivenStructure`.
    """
    errors: list[InputError] = []
    files: list[Path] = []
    for path in inputs:
        try:
            files += structures_inside(path) if path.is_dir() else [path]
        except InputError as error:
            errors.append(error)
    files = list(dict.fromkeys(files))
    repeated = Counter(map(structure_name, files))
    found = []
    for file in files:
        name = structure_name(file)
        record = f"{file.resolve().parent.name}_{name}" if repeated[name] > 1 else name
        try:
            target = _read_target(file, record, GivenStructure(file.resolve(), use, shows_targets))
        except InputError as error:
            errors.append(error)
            continue
        if not searches:
            target = replace(target, alignments=tuple(([], []) for _ in target.chains))
        found.append(FoundTarget(target, file, 1))
    return unique_targets(found, errors), errors


def _read_target(path: Path, record: str, given: GivenStructure) -> Target:
    structure = read_structure(path)
    for chain in structure.chains:
        if not chain.mask[:, atom_order["CA"]].any():
            raise InputError(f"chain {chain.chain_id!r} lacks CA atoms; remove the chain", path=path)
    chains = make_chains(
        [chain.sequence for chain in structure.chains],
        [f"{record}_{chain.chain_id}" for chain in structure.chains],
    )
    if len(chains) == 1:
        chains = (replace(chains[0], record=""),)
    if given.shows_targets and len(chains) == 1:
        raise InputError("has one chain; --show-target needs a binder and its target", path=path)
    return Target(
        name=record, chains=chains, source=str(path), record=record, warnings=structure.warnings, given=given
    )
