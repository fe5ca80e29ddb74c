"""Limits that no structure meets, alone or together, found before a fit.

Restraints and the chain are edges of a graph of CA atoms, as in distance geometry: the shortest path between two
residues is the largest distance that they can have.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from fastfold.inference.restraints.distances import atom_reach
from fastfold.inference.restraints.paths import Edge, chain_span, shorter_paths
from fastfold.inference.restraints.residues import Residues
from fastfold.inference.restraints.restraint import Atoms, Restraint, grouped
from fastfold.inference.restraints.rows import refuse_lines
from fastfold.protein import residue_constants as rc

_SIDE = 1.6  #: Largest distance of CA and CB in Å
_PEPTIDE_BOND = 1.5  #: Largest length of the bond of C and N in Å
_TO_NEXT = 2.5  #: Largest distance in Å of C and CA, and of CA and N, across the bond between residues

_DENSITY = 0.0075  #: Residues per Å³ of a protein, whose residues take about 134 Å³

_CLOSEST: dict[Atoms, tuple[float, float]] = {"CA": (2.7, 3.3), "CB": (2.7, 3.0), "any": (1.2, 1.9)}
"""Smallest distances in Å of neighbours in a chain, and of other residues.

Neighbours: CA of cis peptides, and the peptide bond. Others: backbones in contact, and disulfides.
"""


def possible_distances(one: Restraint, residues: Residues) -> tuple[float, float]:
    """Return the smallest and the largest distance in Å that the atoms of a restraint can have."""
    separation = residues.separation(one.first, one.second)
    smallest = _CLOSEST[one.atoms][0 if separation == 1 else 1]
    if separation is None:
        return smallest, math.inf
    if one.atoms == "any":
        if separation == 1:
            return smallest, _PEPTIDE_BOND
        return smallest, 2 * _TO_NEXT + chain_span(separation - 2)
    return smallest, chain_span(separation) + _sides(one, residues)


def _sides(one: Restraint, residues: Residues) -> float:
    """Return the largest distance in Å of the restrained atoms of both residues to their CA."""
    return sum(_to_ca(place, one.atoms, residues) for place in (one.first, one.second))


def _to_ca(place: int, atoms: Atoms, residues: Residues) -> float:
    """Return the largest distance in Å of a residue's CA to its restrained atoms."""
    letter = residues.letters[place]
    if atoms == "any":
        return float(atom_reach("CA")[rc.restype_order.get(letter, rc.unk_restype_index)])
    return _SIDE if atoms == "CB" and letter != "G" else 0.0


def check_bounds(path: Path, restraints: Sequence[Restraint], residues: Residues) -> None:
    """Check that a structure can meet each group of restraints, and all restraints outside groups together.

    Raises:
        InputError: No structure meets them; names the lines.
    """
    errors: list[str] = []
    single: list[Restraint] = []
    for group in grouped(restraints):
        problems = [_problem(restraints[number], residues) for number in group]
        if all(problems):
            lines = dict.fromkeys(restraints[number].line for number in group)
            errors.append(f"{', '.join(lines)}: {problems[0]}")
        elif len(group) == 1:
            single.append(restraints[group[0]])
    errors += _contradictions(single, residues)
    errors += _crowded(single, residues)[:1]
    refuse_lines(path, "has restraints that no structure meets", errors)


def _problem(one: Restraint, residues: Residues) -> str:
    """Return the reason why no structure meets a restraint, empty if one does."""
    smallest, largest = possible_distances(one, residues)
    names = f"{residues.label(one.first)} and {residues.label(one.second)}"
    atoms = "the closest atoms" if one.atoms == "any" else one.atoms
    if one.high < smallest:
        return (
            f"max {one.high:g} is too small: {atoms} of {names} are {smallest:g} Å apart or more; raise max"
        )
    if one.low > largest:
        return (
            f"min {one.low:g} is too large: {atoms} of {names} are {largest:.3g} Å apart or less; lower min"
        )
    return ""


def _crowded(restraints: Sequence[Restraint], residues: Residues) -> list[str]:
    """Return a message for each residue with over twice as many partners as a protein has room for near it."""
    partners: dict[int, dict[int, float]] = defaultdict(dict)
    for one in restraints:
        if math.isfinite(one.high):
            partners[one.first][one.second] = partners[one.second][one.first] = one.high + _sides(
                one, residues
            )
    errors = []
    for place, near in sorted(partners.items()):
        radius = max(near.values())
        room = 4 / 3 * math.pi * radius**3 * _DENSITY
        if len(near) > 2 * room + 4:
            errors.append(
                f"{residues.label(place)} has {len(near)} partners within {radius:.3g} Å, where a protein has about "
                f"{room:.0f} residues; leave out improbable pairs: scores of all pairs are not restraints"
            )
    return errors


def _contradictions(restraints: Sequence[Restraint], residues: Residues) -> list[str]:
    """Return a message for each restraint whose ``low`` other restraints exclude."""
    errors, reported = _of_same_pairs(restraints)
    if not any(one.low for one in restraints):
        return errors
    places = sorted({place for one in restraints for place in (one.first, one.second)})
    edges = [
        Edge(one.first, one.second, one.high + _sides(one, residues), number)
        for number, one in enumerate(restraints)
        if math.isfinite(one.high)
    ]
    far = [one for one in restraints if one.low and one not in reported]
    # CB is at most this much nearer than CA; the closest atoms are never farther apart than CA.
    nearer = [_sides(one, residues) if one.atoms == "CB" else 0.0 for one in far]
    paths = shorter_paths(
        places,
        [residues.separation(*pair) for pair in itertools.pairwise(places)],
        edges,
        [(one.first, one.second, one.low - sides) for one, sides in zip(far, nearer, strict=True)],
    )
    for one, sides, path in zip(far, nearer, paths, strict=True):
        if path is not None:
            lines = ", ".join(dict.fromkeys(restraints[number].line for number in path.restraints))
            errors.append(
                f"{one.line}: min {one.low:g} is too large: {lines} and the chain allow "
                f"{path.length + sides:.3g} Å or less; remove one of them"
            )
    return errors


def _of_same_pairs(restraints: Sequence[Restraint]) -> tuple[list[str], set[Restraint]]:
    """Return a message for each pair whose restraints of the same atoms exclude each other, and their restraints."""
    by_pair: dict[tuple[frozenset[int], Atoms], list[Restraint]] = defaultdict(list)
    for one in restraints:
        by_pair[frozenset((one.first, one.second)), one.atoms].append(one)
    errors: list[str] = []
    reported: set[Restraint] = set()
    for same in by_pair.values():
        far, near = max(same, key=lambda one: one.low), min(same, key=lambda one: one.high)
        if far.low > near.high:
            reported |= set(same)
            errors.append(
                f"{far.line}: min {far.low:g} contradicts max {near.high:g} of {near.line}; remove one of them, or "
                "give them one group"
            )
    return errors, reported
