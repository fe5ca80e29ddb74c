"""Structures of the user as templates, aligned by the profile of the chain's alignment or by the user."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastfold.data.msa.msa import Msa, split_records
from fastfold.data.templates.entry import EntryChain
from fastfold.data.templates.features import Template, check_parts, map_to_sequence, place_template
from fastfold.data.templates.hits import Outcome, TemplateSkipped
from fastfold.data.templates.search import align_to_profile
from fastfold.data.templates.select import ChainTemplates
from fastfold.errors import InputError
from fastfold.protein.io.observed import TEMPLATE, read_logged
from fastfold.protein.io.read import structure_name
from fastfold.protein.residue_constants import mask_unknown
from fastfold.protein.structure import Structure
from fastfold.utils.text_files import PathLike, read_text_bytes

_LIMIT = 1 << 28
_log = logging.getLogger(__name__)
_STRUCTURE = re.compile(r"\.(pdb|ent|cif|mmcif)(\.gz)?$", re.IGNORECASE)
_OF_A_PASS = re.compile(r".+_rank_\d{3,9}_.+[._]r\d+")
"""Name of the structure after one pass of a prediction, in FastFold's results and ColabFold's."""
_OF_AN_ENSEMBLE = "_ensemble"


@dataclass(frozen=True)
class CustomChain:
    """Protein chain of a user's structure file."""

    file: str  #: Name of the file without its suffixes
    name: str  #: ``<file>_<chain>``, name of the template
    chain: EntryChain  #: Its sequence and atoms

    @property
    def chain_id(self) -> str:
        """Name of the chain in its file."""
        return self.name.removeprefix(f"{self.file}_")


@dataclass(frozen=True)
class CustomAlignment:
    """User's alignment of structures with one chain."""

    path: PathLike  #: Path of the file
    query: str  #: Letters of the chain, the first row
    #: For each further row, its name and its letters in A3M's form: upper case and ``-`` for each residue of the
    #: query, lower case for insertions
    rows: dict[str, str]


def read_custom_chains(paths: Iterable[PathLike | Structure]) -> tuple[list[CustomChain], list[Outcome]]:
    """Read all protein chains of the user's structures, with an outcome for each file left out.

    Paths are mmCIF and PDB files, plain or ``.gz``, folders of them, and structures that were read. An invalid file of
    a folder is left out, with a warning. Hidden files are ignored.

    Raises:
        InputError: A named file cannot be read, has no protein, or has the name of another; a folder contains no valid
            structure; or a disk or network failed.
    """
    chains: list[CustomChain] = []
    unusable: list[Outcome] = []
    files: dict[str, Path | Structure] = {}
    for path in paths:
        if isinstance(path, Structure):
            chains += _read_chains(path, files)
            continue
        path = Path(path)
        inside = structures_inside(path) if path.is_dir() else [path]
        before = len(chains)
        for file in inside:
            try:
                chains += _read_chains(file, files)
            except InputError as error:
                if not path.is_dir() or error.temporary:
                    raise
                _log.warning("%s; left out of the templates", error)
                unusable.append(Outcome(structure_name(file), "unreadable", str(error)))
        if len(chains) == before:
            raise InputError(
                f"contains no valid structure; the first problem: {unusable[-len(inside)].message}", path=path
            )
    return chains, unusable


def _read_chains(path: Path | Structure, files: dict[str, Path | Structure]) -> list[CustomChain]:
    """Read the chains of a file, and add its name to ``files``."""
    name = structure_name(path)
    if name in files:
        other = files[name]
        raise InputError(
            f"has the same name as {'another structure' if isinstance(other, Structure) else other}; rename one, "
            "because names identify templates",
            path=name if isinstance(path, Structure) else path,
        )
    structure = read_logged(path, TEMPLATE, whole=True)
    files[name] = path
    return [
        CustomChain(name, f"{name}_{one.chain_id}", EntryChain(one.sequence, one.positions, one.mask))
        for one in structure.chains
    ]


def structures_inside(folder: Path) -> list[Path]:
    """Return the structures of a folder, sorted by name; of one in several formats the mmCIF file.

    Of results of FastFold and ColabFold these are predictions, without structures after single passes and
    representatives of ensembles.

    Raises:
        InputError: The folder has none.
    """
    files = sorted(
        file
        for file in folder.iterdir()
        if _STRUCTURE.search(file.name)
        and not file.name.startswith(".")
        and file.is_file()
        and not _repeats_prediction(file)
    )
    by_name: dict[str, Path] = {}
    for file in sorted(files, key=lambda file: ".cif" not in file.name and ".mmcif" not in file.name):
        by_name.setdefault(structure_name(file), file)
    if not by_name:
        raise InputError("contains no structure (.cif, .mmcif, .pdb, .ent, plain or with .gz)", path=folder)
    return sorted(by_name.values())


def _repeats_prediction(file: Path) -> bool:
    """Return True for a structure of results that is not a prediction of its own."""
    name = structure_name(file)
    is_of_ensemble = name.endswith(_OF_AN_ENSEMBLE) and file.with_name(f"{name}.json").is_file()
    return is_of_ensemble or _OF_A_PASS.fullmatch(name) is not None


def read_custom_alignment(path: PathLike) -> CustomAlignment:
    """Read an alignment of structures with a chain: A3M, or FASTA with rows of equal length.

    The chain is first, then a row for each structure, named ``<file>_<chain>``, or ``<file>`` if it has one chain.

    Raises:
        InputError: The file cannot be read, or is not such an alignment.
    """
    text = read_text_bytes(path, limit=_LIMIT).decode("utf-8", "replace")
    _, records = split_records(text)
    rows: dict[str, str] = {}
    for record in records:
        name = (record.header.split() or [""])[0]
        letters = "".join("".join(record.lines).split()).replace(".", "-")
        problem = ""
        if name in rows:
            problem = "the name is repeated; each chain has one row"
        elif not re.fullmatch("[A-Za-z-]+", letters):
            problem = "the row contains a character that is neither a letter nor a gap"
        if problem:
            raise InputError(problem, path=path, line=record.line, record=name)
        rows[name] = letters
    if len(rows) < 2:
        raise InputError("expected the chain's row, then a row for each structure, found one row", path=path)
    first = next(iter(rows))
    query = rows.pop(first)
    if "-" in query:  # FASTA: letters in columns where the chain has a gap are insertions
        if any(len(row) != len(query) for row in rows.values()):
            raise InputError("rows of an alignment in FASTA must have equal lengths", path=path)
        rows = {name: _insertions_lowered(query, row) for name, row in rows.items()}
    query = query.replace("-", "").upper()
    for name, row in rows.items():
        width = sum(letter == "-" or letter.isupper() for letter in row)
        if width != len(query):
            raise InputError(
                f"the row has {width} columns, the chain {len(query)} residues", path=path, record=name
            )
    return CustomAlignment(path, query, rows)


def _insertions_lowered(query: str, row: str) -> str:
    pairs = zip(query, row.upper(), strict=True)
    return "".join(letter if mine != "-" else letter.replace("-", "").lower() for mine, letter in pairs)


def custom_templates(
    chains: Sequence[CustomChain],
    query: str,
    msa: Msa,
    *,
    max_templates: int,
    alignments: Sequence[CustomAlignment] = (),
    unusable: Sequence[Outcome] = (),
    parts: Collection[int] | None = None,
) -> ChainTemplates:
    """Make templates from the user's structures.

    The best aligned chain of each structure comes first, in the order of the structures, then their second chains and
    so on. If chains of one structure show the same letters, the first one is used. Dates and similarity to the query
    are ignored. Only the ``parts`` of the chain count, residues from 0; None for a whole chain.

    Raises:
        InputError: An alignment of the user does not fit its structures.
    """
    places_of_user = _given_places(chains, query, alignments)
    aligned = align_to_profile(
        msa, [one.chain.sequence for i, one in enumerate(chains) if i not in places_of_user]
    )
    profiles = dict(zip([i for i in range(len(chains)) if i not in places_of_user], aligned, strict=True))
    candidates: list[tuple[int, int, Template]] = []
    outcomes: dict[int, Outcome] = {}
    for i, one in enumerate(chains):
        try:
            places = places_of_user[i] if i in places_of_user else aligned_residues(profiles[i], query, one)
            letters = {mine: one.chain.sequence[place] for mine, place in places.items()}
            template = place_template(one.chain, places, letters, len(query), name=one.name)
            check_parts(template, parts)
        except TemplateSkipped as skipped:
            outcomes[i] = Outcome(one.name, skipped.reason, str(skipped))
            continue
        same = [t for j, _, t in candidates if chains[j].file == one.file and t.sequence == template.sequence]
        if same:
            outcomes[i] = Outcome(one.name, "repeated", f"it repeats the letters of {same[0].name}")
            continue
        count = sum(parts is None or place in parts for place in places)
        candidates.append((i, count, template))
    order = _by_structure(candidates, chains)
    chosen = [template for _, _, template in order[:max_templates]]
    for i, count, template in order:
        if template in chosen:
            remark = "aligned as given" if i in places_of_user else ""
            outcomes[i] = Outcome(template.name, "used", remark, aligned=count)
        else:
            outcomes[i] = Outcome(template.name, "not needed", "there are enough templates without it")
    source = "given structures"
    if alignments and not places_of_user:
        source += " (no given alignment is of this chain)"
    all_outcomes = (*(outcomes[i] for i in sorted(outcomes)), *unusable)
    return ChainTemplates(tuple(chosen), all_outcomes, len(chains), (source,))


def _by_structure(
    candidates: Sequence[tuple[int, int, Template]], chains: Sequence[CustomChain]
) -> list[tuple[int, int, Template]]:
    """Sort by rank within the structure, then by structure."""
    by_file: dict[str, list[tuple[int, int, Template]]] = {one.file: [] for one in chains}
    for candidate in sorted(candidates, key=lambda one: -one[1]):
        by_file[chains[candidate[0]].file].append(candidate)
    rounds = itertools.zip_longest(*by_file.values())
    return [candidate for one in rounds for candidate in one if candidate is not None]


def aligned_residues(places: dict[int, int], query: str, one: CustomChain) -> dict[int, int]:
    """Return the aligned residues of a chain, from the profile, or from Kalign if the profile aligns none.

    Raises:
        TemplateSkipped: No part of its sequence aligns with the query.
    """
    if places:
        return places
    try:
        return map_to_sequence(query, one.chain.sequence, name=one.name)
    except TemplateSkipped:
        raise TemplateSkipped("other sequence", "no part of its sequence aligns with the chain") from None


def _given_places(
    chains: Sequence[CustomChain], query: str, alignments: Sequence[CustomAlignment]
) -> dict[int, dict[int, int]]:
    """Return the aligned residues from the user's alignments of this query, by number of the chain."""
    single = {one.file for one in chains if sum(other.file == one.file for other in chains) == 1}
    names = {one.name: i for i, one in enumerate(chains)}
    names |= {one.file: i for i, one in enumerate(chains) if one.file in single}
    places: dict[int, dict[int, int]] = {}
    for alignment in alignments:
        for name in alignment.rows:
            if name not in names:
                known = ", ".join(one.name for one in chains[:5])
                raise InputError(
                    f"no structure has a chain of this name; expected one of {known}",
                    path=alignment.path,
                    record=name,
                )
        if mask_unknown(alignment.query) != query:
            continue
        for name, row in alignment.rows.items():
            number = names[name]
            places[number] = _row_places(row, chains[number].chain.sequence, name, alignment.path)
    return places


def _row_places(row: str, sequence: str, name: str, path: PathLike) -> dict[int, int]:
    """Return the residue of the sequence for each aligned residue of the query."""
    letters = mask_unknown(row.replace("-", ""))
    pattern = "".join("." if letter == "X" else f"[{letter}X]" for letter in letters)
    match = re.search(pattern, sequence)
    if not letters or match is None:
        raise InputError(
            "the letters of this row are not in the sequence of its structure, which is "
            f"{sequence[:40]}{'…' if len(sequence) > 40 else ''}",
            path=path,
            record=name,
        )
    places: dict[int, int] = {}
    column, place = 0, match.start()
    for letter in row:
        if letter.isupper():
            places[column] = place
        place += letter != "-"
        column += letter == "-" or letter.isupper()
    if not places:
        raise InputError("the row lacks an aligned residue", path=path, record=name)
    return places
