"""Build protein chains from the records of a structure file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import without_bond
from fastfold.protein.io.records import (
    UNKNOWN,
    Conformer,
    RecordedChain,
    amino_acid,
    bonded,
    choose_conformer,
)
from fastfold.protein.structure import ChainStructure
from fastfold.utils.foreign_text import first_few

_MATCH, _UNKNOWN, _MISMATCH = 2.0, 0.0, -4.0
_BROKEN_BOND, _ODD_NUMBER, _FIRST_PLACE = 10.0, 3.0, 1.0
_MAX_TABLE = 50_000_000
_LEAST_IDENTITY = 0.9


def place_in_sequence(
    residues: Sequence[Conformer], sequence: str, missing: Sequence[int] = ()
) -> list[int] | None:
    """Return strictly increasing positions of observed residues in the sequence.

    Residue numbers are used if they lead to equal residues everywhere. Otherwise an alignment assigns a place to every
    observed residue. Equal residues raise its score. Residues of another type, a gap between residues joined by a
    peptide bond, and a distance in the sequence that differs from the residue numbers lower it.

    The sequence has one-letter residues of the polymer. ``missing`` has the residue numbers that the file lists as
    missing.

    Returns:
        A position for each residue, or None if they do not fit: more residues than the sequence has, or fewer than 90%
        of those of known type equal it.
    """
    if len(residues) > len(sequence):
        return None
    numbers = [residue.record.number for residue in residues]
    # Position 0 has the lowest number if the missing ones are known, otherwise probably number 1.
    lowest = min([*numbers, *missing])
    offsets = (-lowest, -1) if missing else (-1, -lowest)
    for offset in offsets:
        places = [number + offset for number in numbers]
        if _fits(residues, places, sequence):
            return places
    if len(residues) * len(sequence) > _MAX_TABLE:
        return None
    places = _align(residues, sequence, first_place=numbers[0] + offsets[0])
    pairs = [(r.letter, sequence[p]) for r, p in zip(residues, places, strict=True)]
    known = [a == b for a, b in pairs if UNKNOWN not in (a, b)]
    return places if sum(known) >= _LEAST_IDENTITY * len(known) else None


def _fits(residues: Sequence[Conformer], places: Sequence[int], sequence: str) -> bool:
    if places[0] < 0 or places[-1] >= len(sequence):
        return False
    if any(after <= before for before, after in itertools.pairwise(places)):
        return False
    return all(residue.letter == sequence[place] for residue, place in zip(residues, places, strict=True))


def _align(residues: Sequence[Conformer], sequence: str, first_place: int) -> list[int]:
    """Find the best increasing places, by dynamic programming with a row of scores per residue."""
    letters = np.frombuffer(sequence.encode("ascii"), np.uint8)
    n = len(letters)
    came_from = np.zeros((len(residues), n), np.int32)
    here = np.arange(n)
    score = _match(residues[0], letters)
    if 0 <= first_place < n:
        score[first_place] += _FIRST_PLACE
    for i in range(1, len(residues)):
        before, after = residues[i - 1], residues[i]
        joined = bonded(before, after)
        step = after.record.number - before.record.number
        expected = 1 if joined or step < 1 else step
        # The best place further left, with the penalty of an unexpected distance ...
        best = np.maximum.accumulate(score)
        at = np.maximum.accumulate(np.where(score == best, here, 0))
        far = np.full(n, -np.inf)
        far[1:] = best[:-1] - (_BROKEN_BOND if joined else _ODD_NUMBER)
        source = np.zeros(n, np.int32)
        source[1:] = at[:-1]
        # ... against the place at the expected distance.
        if expected < n:
            near = np.full(n, -np.inf)
            near[expected:] = score[: n - expected]
            source = np.where(near >= far, here - expected, source)
            far = np.maximum(near, far)
        came_from[i] = source
        score = far + _match(after, letters)
    places = [int(np.argmax(score))]
    for i in range(len(residues) - 1, 0, -1):
        places.append(int(came_from[i, places[-1]]))
    return places[::-1]


def _match(residue: Conformer, letters: np.ndarray) -> np.ndarray:
    score = np.where(letters == ord(residue.letter), _MATCH, _MISMATCH)
    score[letters == ord(UNKNOWN)] = _UNKNOWN
    return score if residue.letter != UNKNOWN else np.full(len(letters), _UNKNOWN)


_SHOWN = 10
_MAX_STEP = 20_000
"""Limit of a step between residue numbers, larger than in any PDB file; keeps sums within 32 bits."""


def build_chain(
    record: RecordedChain, parents: Mapping[str, str], warnings: list[str]
) -> ChainStructure | None:
    """Determine residues, sequence and numbering of one chain; None if it is not a protein or lacks protein atoms.

    ``warnings`` receives a sentence for each doubtful decision.
    """
    if record.protein is False:
        return None
    residues = [r for r in (choose_conformer(r, parents) for r in record.residues.values()) if r is not None]
    residues = _without_ligands(residues, record.sequence)
    if _stated_positions(residues) is not None:
        residues.sort(key=lambda residue: residue.record.position or 0)
    nucleotides = sum(residue.is_nucleotide for residue in record.residues.values())
    if not residues or (record.protein is None and nucleotides >= len(residues)):
        return None
    _report_types(record.chain_id, residues, parents, warnings)
    placed = _place(record, residues, parents, warnings)
    if placed is None:
        sequence = "".join(residue.letter for residue in residues)
        stated = _stated_positions(residues)
        index = residue_index_from_numbers(residues) if stated is None else np.array(stated, np.int32)
        chain = _pack(record.chain_id, sequence, residues, range(len(residues)), index)
        _report_breaks(chain, warnings)
    else:
        letters, places = placed
        _agree(record.chain_id, letters, residues, places, warnings)
        index = np.arange(len(letters), dtype=np.int32)
        chain = _pack(record.chain_id, "".join(letters), residues, places, index, has_sequence=True)
    if not chain.mask[:, [rc.atom_order["N"], rc.atom_order["C"]]].any():
        warnings.append(f"Chain {record.chain_id!r} has only CA atoms of its backbone.")
    return chain


def _without_ligands(residues: list[Conformer], sequence: Sequence[str] | None) -> list[Conformer]:
    """Remove HETATM residues that are not part of the polymer.

    Their names are not in the sequence, or, without a sequence, their names are unknown and no peptide bond joins them
    to a neighbour.
    """
    names = None if sequence is None else set(sequence)
    kept = []
    for i, residue in enumerate(residues):
        if residue.record.hetero:
            if names is not None:
                if names.isdisjoint(residue.record.names):
                    continue
            elif not residue.known:
                before = i > 0 and bonded(residues[i - 1], residue)
                after = i + 1 < len(residues) and bonded(residue, residues[i + 1])
                if not (before or after):
                    continue
        kept.append(residue)
    return kept


def _report_types(
    chain_id: str, residues: Sequence[Conformer], parents: Mapping[str, str], warnings: list[str]
) -> None:
    """Report residues whose types do not follow from their names."""
    unknown, by_atoms = [], []
    for residue in residues:
        if residue.name in rc.restype_3to1:
            continue
        label = f"{residue.name} {_number(residue)}"
        if not residue.known and residue.letter == UNKNOWN:
            unknown.append(label)
        elif residue.letter != amino_acid(residue.name, parents):
            by_atoms.append(f"{label} as {rc.restype_1to3[residue.letter]}")
    for labels, sentence in (
        (unknown, "has residues of unknown type, read as X with backbone and CB"),
        (by_atoms, "has residues that are read by their atoms"),
    ):
        if labels:
            warnings.append(f"Chain {chain_id!r} {sentence}: {first_few(labels, _SHOWN)}.")


def _report_breaks(chain: ChainStructure, warnings: list[str]) -> None:
    apart = without_bond(chain.positions, chain.mask)
    breaks = np.flatnonzero((np.diff(chain.residue_index) == 1) & apart)
    if len(breaks):
        labels = (f"{chain.residue_names[i]} {chain.author_numbers[i]}" for i in (breaks[0], breaks[0] + 1))
        more = f", and at {len(breaks) - 1} more places" if len(breaks) > 1 else ""
        warnings.append(
            f"Chain {chain.chain_id!r} breaks between {' and '.join(labels)} with consecutive numbers{more}; if these "
            "are two molecules, give each a separate chain name."
        )


def _place(
    record: RecordedChain, residues: list[Conformer], parents: Mapping[str, str], warnings: list[str]
) -> tuple[list[str], list[int]] | None:
    """Return the letters of the full sequence and the places of observed residues; None without a sequence."""
    if record.sequence is None:
        return None
    letters = [amino_acid(name, parents) or UNKNOWN for name in record.sequence]
    positions = _stated_positions(residues)
    if positions is not None:
        return letters, positions
    places = place_in_sequence(residues, "".join(letters), record.missing)
    if places is None:
        warnings.append(
            f"The residues of chain {record.chain_id!r} do not fit its sequence (SEQRES), which is ignored."
        )
        return None
    return letters, places


def _agree(
    chain_id: str,
    letters: list[str],
    residues: Sequence[Conformer],
    places: Sequence[int],
    warnings: list[str],
) -> None:
    """Write the observed residues into the sequence; an observed X keeps the sequence's type."""
    differing = 0
    for residue, place in zip(residues, places, strict=True):
        if residue.letter == UNKNOWN != letters[place]:
            allowed = rc.restype_atom37_mask[rc.restype_order[letters[place]]]
            residue.atoms = {slot: atom for slot, atom in residue.atoms.items() if allowed[slot]}
        elif residue.letter != letters[place]:
            differing += letters[place] != UNKNOWN
            letters[place] = residue.letter
    if differing:
        warnings.append(
            f"Chain {chain_id!r} was observed with residue types other than its sequence at {differing} places; "
            "the observed types are used."
        )


def _stated_positions(residues: Sequence[Conformer]) -> list[int] | None:
    """Return the positions in the sequence stated by the file, None if there are none."""
    positions = [p for residue in residues if (p := residue.record.position) is not None]
    return positions if len(positions) == len(residues) else None


def residue_index_from_numbers(residues: Sequence[Conformer]) -> np.ndarray:
    """Derive strictly increasing indices ``[N]`` int32 from residue numbers.

    They start at the first residue's number and follow the numbers, with two exceptions. Residues joined by a peptide
    bond are neighbours regardless of their numbers. A number that does not increase (insertion codes, restarted
    numbering) is replaced by the next free one, which shifts all later residues.
    """
    index = [residues[0].record.number]
    for before, after in itertools.pairwise(residues):
        step = after.record.number - before.record.number
        if step != 1 and bonded(before, after):
            step = 1
        index.append(index[-1] + min(max(step, 1), _MAX_STEP))
    return np.array(index, np.int32)


def _pack(
    chain_id: str,
    sequence: str,
    residues: Sequence[Conformer],
    places: Sequence[int],
    residue_index: np.ndarray,
    *,
    has_sequence: bool = False,
) -> ChainStructure:
    """Build the arrays of a chain; ``places`` are the residues' positions in the sequence."""
    rows: list[int] = []
    slots: list[int] = []
    values: list[tuple[float, float, float, float]] = []
    numbers, names = [""] * len(sequence), [""] * len(sequence)
    for place, residue in zip(places, residues, strict=True):
        numbers[place], names[place] = _number(residue), residue.name
        for slot, atom in residue.atoms.items():
            rows.append(place)
            slots.append(slot)
            values.append((atom.x, atom.y, atom.z, atom.b_factor))
    packed = np.zeros((len(sequence), rc.atom_type_num, 4), np.float32)
    mask = np.zeros((len(sequence), rc.atom_type_num), np.float32)
    packed[rows, slots] = values
    mask[rows, slots] = 1.0
    return ChainStructure(
        chain_id=chain_id,
        sequence=sequence,
        positions=np.ascontiguousarray(packed[..., :3]),
        mask=mask,
        residue_index=residue_index,
        b_factors=np.ascontiguousarray(packed[..., 3]),
        author_numbers=tuple(numbers),
        residue_names=tuple(names),
        has_sequence=has_sequence,
    )


def _number(residue: Conformer) -> str:
    return f"{residue.record.number}{residue.record.insertion}"
