"""Structures of whole complexes as templates that span the chains of a target (AF_unmasked)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from fastfold.data.msa.msa import Msa
from fastfold.data.targets import Chain
from fastfold.data.templates.custom import CustomChain, aligned_residues
from fastfold.data.templates.entry import EntryChain
from fastfold.data.templates.features import Template, map_to_sequence, place_template
from fastfold.data.templates.hits import Outcome, TemplateSkipped
from fastfold.data.templates.search import align_to_profile
from fastfold.data.templates.select import ChainTemplates
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import TEMPLATE, read_logged
from fastfold.protein.io.read import structure_name
from fastfold.protein.metrics.tm_score import superpose
from fastfold.protein.structure import Structure
from fastfold.utils.foreign_text import table_rows
from fastfold.utils.text_files import PathLike, read_text_bytes

_log = logging.getLogger(__name__)

_BACKBONE = [rc.atom_order[atom] for atom in ("N", "CA", "C", "O")]
_FEWEST = 3  #: Smallest number of common residues of a superposition

Places = Mapping[int, int]  #: Residue of a structure's chain for each aligned residue of a target's chain


@dataclass(frozen=True)
class _Placed:
    """Chain of a structure that is assigned to a chain of the target."""

    one: CustomChain
    places: Places
    remark: str = ""


def read_whole(path: PathLike | Structure, *, min_plddt: float = 0.0) -> list[CustomChain]:
    """Read all protein chains of a structure, or of its file.

    Residues with an atom of a smaller B-factor than ``min_plddt``, which is the pLDDT of predictions, are left out.

    Raises:
        InputError: The file cannot be read or has no protein, or no residue is left.
    """
    structure, name = read_logged(path, TEMPLATE, whole=True), structure_name(path)
    chains, count = [], 0
    for one in structure.chains:
        kept = np.all((one.b_factors >= min_plddt) | (one.mask == 0), axis=-1, keepdims=True)
        count += int((~kept).sum())
        mask, positions = one.mask * kept, one.positions * kept[..., None]
        chains.append(CustomChain(name, f"{name}_{one.chain_id}", EntryChain(one.sequence, positions, mask)))
    if count and not any(one.chain.mask.any() for one in chains):
        raise InputError(
            f"all residues have a pLDDT (B-factor) under {min_plddt:g}; give a smaller `TemplateOptions.min_plddt`",
            record=name,
        )
    if count:
        _log.warning("%s: %d residues of pLDDT under %g are left free", name, count, min_plddt)
    return chains


def complex_templates(
    sequences: Sequence[str],
    profiles: Sequence[Msa],
    complexes: Sequence[Sequence[CustomChain]],
    chains: Sequence[CustomChain] = (),
    *,
    keep_clashes: bool = False,
    overlap: float | None = None,
    chain_map: Mapping[str, Mapping[int, str]] | None = None,
    parts: Sequence[Collection[int] | None] | None = None,
) -> list[ChainTemplates]:
    """Make templates that span the chains of a target.

    Chains of a complex are assigned to those of the target by their sequences, in the order of the file where several
    fit equally, or as ``chain_map`` has for indices of the target's chains by name of the structure. A chain of the
    target that a complex lacks has an empty template, and is left to the network.

    The ``profiles`` are an alignment of each chain of the target, whose profile aligns the structures. The n-th of the
    ``complexes`` gives the n-th template of every chain. The ``chains`` replace those of the complexes, superposed on
    them. Residues whose CA atoms are within 3.5 Å of another residue's are left free, unless ``keep_clashes``; with
    ``overlap``, those whose van der Waals spheres overlap by this in Å instead (:func:`overlapping_residues`).

    The ``parts`` are the residues that each chain of the target has of its sequence, from 0; None for all. Only these
    are aligned, and different parts may be in one chain of a structure.
    """
    parts = [None] * len(sequences) if parts is None else parts
    replacing = _assign(sequences, profiles, chains, parts)
    templates = [ChainTemplates() for _ in sequences]
    used = {placed.one.name for placed in replacing.values()}
    for one in chains:
        if one.name not in used:
            templates[0] += _left_out(
                one.name, "it aligns with no chain of the target that another one does not replace"
            )
    for frame, structure in enumerate(complexes, start=1):
        name = structure[0].file
        if chain_map is not None and name in chain_map:
            placed = _assign_as_given(sequences, profiles, structure, chain_map[name])
            placed = {index: _cut(one, parts[index]) for index, one in placed.items()}
        else:
            placed = _assign(sequences, profiles, structure, parts)
        for index, other in replacing.items():
            if index in placed:
                placed[index] = _superposed(other, placed[index])
            else:
                templates[index] += _left_out(other.one.name, f"{name} lacks the chain to superpose it on")
        if not keep_clashes:
            placed = _without_clashes(placed, overlap)
        for index, sequence in enumerate(sequences):
            templates[index] += _template(placed.get(index), len(sequence), frame, name)
    return templates


def _assign(
    sequences: Sequence[str],
    profiles: Sequence[Msa],
    chains: Sequence[CustomChain],
    parts: Sequence[Collection[int] | None],
) -> dict[int, _Placed]:
    """Assign chains of a structure to those of the target, those with most equal residues first."""
    known: dict[str, list[Places | None]] = {}
    for sequence, msa in zip(sequences, profiles, strict=True):
        if sequence not in known and chains:
            aligned = align_to_profile(msa, [one.chain.sequence for one in chains])
            known[sequence] = [
                _places(places, sequence, one) for places, one in zip(aligned, chains, strict=True)
            ]
    options: dict[tuple[int, int], _Placed] = {}
    equal: dict[tuple[int, int], int] = {}
    for i, sequence in enumerate(sequences):
        for j, places in enumerate(known.get(sequence, ())):
            placed = _cut(_Placed(chains[j], places or {}), parts[i])
            if placed.places:
                letters = chains[j].chain.sequence
                options[i, j] = placed
                equal[i, j] = sum(sequence[mine] == letters[theirs] for mine, theirs in placed.places.items())
    assigned: dict[int, _Placed] = {}
    used: dict[int, set[int]] = {}
    for i, j in sorted(options, key=lambda pair: (-equal[pair], -len(options[pair].places), pair)):
        placed = options[i, j]
        residues = set(range(len(chains[j].chain.sequence)) if parts[i] is None else placed.places.values())
        if i not in assigned and used.setdefault(j, set()).isdisjoint(residues):
            assigned[i] = placed
            used[j] |= residues
    return assigned


def _cut(placed: _Placed, part: Collection[int] | None) -> _Placed:
    """Return the residues of a chain that are aligned with a part of the target's chain; None for all."""
    if part is None:
        return placed
    places = {mine: theirs for mine, theirs in placed.places.items() if mine in part}
    chain = placed.one.chain
    mask = np.zeros_like(chain.mask)
    shown = list(places.values())
    mask[shown] = chain.mask[shown]
    return replace(placed, one=replace(placed.one, chain=replace(chain, mask=mask)), places=places)


def _assign_as_given(
    sequences: Sequence[str],
    profiles: Sequence[Msa],
    chains: Sequence[CustomChain],
    chain_ids: Mapping[int, str],
) -> dict[int, _Placed]:
    """Assign the chains that a user names; unlike sequences are aligned by Kalign."""
    by_id = {one.chain_id: one for one in chains}
    assigned = {}
    for index, chain_id in chain_ids.items():
        one = by_id[chain_id]
        (places,) = align_to_profile(profiles[index], [one.chain.sequence])
        if not places:
            places = map_to_sequence(sequences[index], one.chain.sequence, name=one.name, min_identity=0.0)
        assigned[index] = _Placed(one, places, "assigned as given")
    return assigned


def _places(places: dict[int, int], query: str, one: CustomChain) -> Places | None:
    try:
        return aligned_residues(places, query, one)
    except TemplateSkipped:
        return None


def _superposed(moving: _Placed, fixed: _Placed) -> _Placed:
    """Superpose a chain on its place in a complex, by backbone atoms of residues that both have."""
    shared = sorted(moving.places.keys() & fixed.places.keys())
    mine, theirs = [moving.places[k] for k in shared], [fixed.places[k] for k in shared]
    new, old = moving.one.chain, fixed.one.chain
    atoms = np.ix_(mine, _BACKBONE), np.ix_(theirs, _BACKBONE)
    weights = new.mask[atoms[0]] * old.mask[atoms[1]]
    if weights.any(-1).sum() < _FEWEST:
        return replace(fixed, remark=f"{moving.one.name} has too few residues in common to be superposed")
    motion = superpose(
        _points(new.positions[atoms[0]]),
        _points(old.positions[atoms[1]]),
        torch.from_numpy(weights.reshape(-1).astype(np.float64)),
    )
    moved = motion[..., None].apply(_points(new.positions))
    positions = moved.numpy().reshape(new.positions.shape).astype(np.float32) * new.mask[..., None]
    chain = replace(moving.one, chain=replace(new, positions=positions))
    return _Placed(chain, moving.places, f"superposed on {fixed.one.name}")


def _points(positions: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(positions.reshape(-1, 3).astype(np.float64))


def _without_clashes(placed: Mapping[int, _Placed], overlap: float | None) -> dict[int, _Placed]:
    """Remove both residues of each clash within and between the chains."""
    order = sorted(placed)
    chains = [placed[index].one.chain for index in order]
    free = clashing_residues(chains) if overlap is None else overlapping_residues(chains, overlap)
    cleared = {}
    for index, clashes in zip(order, free, strict=True):
        one = placed[index]
        places = {mine: theirs for mine, theirs in one.places.items() if not clashes[theirs]}
        count = len(one.places) - len(places)
        remark = "; ".join(
            filter(None, [one.remark, f"{count} clashing residues left free" if count else ""])
        )
        cleared[index] = replace(one, places=places, remark=remark)
    return cleared


def _template(placed: _Placed | None, length: int, frame: int, name: str) -> ChainTemplates:
    """Return the template of one chain of the target, empty where the structure lacks the chain."""
    source = (f"whole complex {name}",)
    why = "none of its chains aligns with this one, which is left free"
    if placed is not None:
        one = placed.one
        letters = {mine: one.chain.sequence[theirs] for mine, theirs in placed.places.items()}
        try:
            template = place_template(one.chain, placed.places, letters, length, name=one.name)
            outcome = Outcome(one.name, "used", placed.remark, aligned=len(placed.places))
            return ChainTemplates((replace(template, frame=frame),), (outcome,), 1, source)
        except TemplateSkipped as skipped:
            name, why = one.name, str(skipped)
    atoms = rc.atom_type_num
    template = Template(
        name=name,
        sequence="-" * length,
        positions=np.zeros((length, atoms, 3), np.float32),
        mask=np.zeros((length, atoms), np.float32),
        sum_probs=0.0,
        mapping={},
        frame=frame,
    )
    outcomes = (Outcome(name, "used"), Outcome(name, "other sequence", why))
    return ChainTemplates((template,), outcomes, 1, source)


def _left_out(name: str, why: str) -> ChainTemplates:
    return ChainTemplates((), (Outcome(name, "other sequence", why),), 1)


CLASH_DISTANCE = 3.5  #: Largest distance in Å of CA atoms of two residues that clash, as in AF_unmasked
HYDROGEN_BOND = 0.4
"""Overlap in Å that two atoms of a hydrogen bond may have in addition, as in AlphaPulldown."""

_ELEMENTS = [name[0] for name in rc.atom_types]
_RADII = np.array([rc.element_radius[element] for element in _ELEMENTS])
_BONDS = np.array([element in "NOS" for element in _ELEMENTS])


def clashing_residues(chains: Sequence[EntryChain]) -> list[np.ndarray]:
    """Return the residues of each chain, ``[N]`` bool, whose CA atom is within 3.5 Å of another residue's."""
    ca = rc.atom_order["CA"]
    points = np.concatenate([chain.positions[:, ca] for chain in chains]).astype(np.float64)
    known = np.concatenate([chain.mask[:, ca] for chain in chains]) > 0
    clashes = np.zeros(len(points), bool)
    for i in np.flatnonzero(known):  # in rows, because large complexes have many pairs
        near = np.linalg.norm(points - points[i], axis=-1) <= CLASH_DISTANCE
        near[i] = False
        clashes[i] = (near & known).any()
    return _split(clashes, chains)


def overlapping_residues(chains: Sequence[EntryChain], overlap: float) -> list[np.ndarray]:
    """Return the residues of each chain, ``[N]`` bool, with an atom that overlaps another residue's.

    As in AlphaPulldown, neighbours in a chain do not count. Spheres overlap by at least ``overlap`` in Å. Two atoms of
    nitrogen, oxygen or sulphur may overlap by 0.4 Å more.
    """
    lengths = [len(chain.sequence) for chain in chains]
    residue, atom = np.nonzero(np.concatenate([chain.mask for chain in chains]) > 0)
    points = np.concatenate([chain.positions for chain in chains])[residue, atom].astype(np.float64)
    number = np.repeat(np.arange(len(chains)), lengths)[residue]
    clashes = np.zeros(sum(lengths), bool)
    for i in range(len(points)):
        limit = _RADII[atom] + _RADII[atom[i]] - overlap - HYDROGEN_BOND * (_BONDS[atom] & _BONDS[atom[i]])
        close = np.square(points - points[i]).sum(-1) <= np.square(np.maximum(limit, 0.0))
        others = (number != number[i]) | (np.abs(residue - residue[i]) > 1)
        clashes[residue[i]] |= (close & others & (limit >= 0)).any()
    return _split(clashes, chains)


def _split(values: np.ndarray, chains: Sequence[EntryChain]) -> list[np.ndarray]:
    return np.split(values, np.cumsum([len(chain.sequence) for chain in chains])[:-1])


_LIMIT = 1 << 24


class _ComplexRow(NamedTuple):
    line: int
    name: str
    file: str
    chain: str


class ChainMap:
    """Rows ``protein,file,chain of the file``, for copies of a protein one after the other.

    Raises:
        InputError: The file cannot be read, or a line has another number of fields.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = path
        text = read_text_bytes(path, limit=_LIMIT).decode("utf-8-sig", "replace")
        self._rows: list[_ComplexRow] = []
        for line, cells in table_rows(text, path, ",", comment="#"):
            fields = [cell.strip() for cell in cells]
            if len(fields) != 3 or not all(fields):
                raise InputError(
                    f"expected protein,file,chain such as 'P23726,3l4q.cif,C', found {','.join(fields)[:60]!r}",
                    path=path,
                    line=line,
                )
            self._rows.append(_ComplexRow(line, fields[0], structure_name(fields[1]), fields[2]))
        if not self._rows:
            raise InputError("has no rows; write protein,file,chain such as 'P23726,3l4q.cif,C'", path=path)

    def check(self, complexes: Sequence[Sequence[CustomChain]]) -> None:
        """Check that all files and their chains exist.

        Raises:
            InputError: A row names a file that was not given, or a chain that it lacks.
        """
        known = {chains[0].file: [one.chain_id for one in chains] for chains in complexes}
        for row in self._rows:
            if row.file not in known:
                raise self._error(
                    row, f"{row.file} is not among `TemplateOptions.complexes`: {', '.join(known)}"
                )
            if row.chain not in known[row.file]:
                chains = ", ".join(known[row.file])
                raise self._error(
                    row, f"{row.file} lacks a protein chain {row.chain}; its chains are {chains}"
                )

    def of_target(self, chains: Sequence[Chain]) -> dict[str, dict[int, str]]:
        """Return the chain of each structure by file and index of the target's chain.

        Raises:
            InputError: A row names none of the chains, or more rows of a file than copies name one.
        """
        mapping: dict[str, dict[int, str]] = {}
        for row in self._rows:
            named = [i for i, one in enumerate(chains) if one.record == row.name]
            named = named or [i for i, one in enumerate(chains) if one.id == row.name]
            if not named:
                names = ", ".join(f"{one.record or one.id}" for one in chains)
                raise self._error(row, f"{row.name} is not a chain of the target; its chains are {names}")
            here = mapping.setdefault(row.file, {})
            free = [i for i in named if i not in here]
            if not free:
                raise self._error(
                    row, f"{row.name} has {len(named)} chains, and this row of {row.file} is one more"
                )
            here[free[0]] = row.chain
        return mapping

    def _error(self, row: _ComplexRow, problem: str) -> InputError:
        return InputError(problem, path=self.path, line=row.line)
