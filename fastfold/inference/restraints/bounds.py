"""Limits that no structure meets, alone or together, found before a fit.

Restraints and the chain are edges of a graph of CA atoms, as in distance geometry: the shortest path between two
residues is the largest distance that they can have.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fastfold.inference.restraints.distances import atom_reach
from fastfold.inference.restraints.residues import Residues
from fastfold.inference.restraints.restraint import Atoms, Restraint, grouped
from fastfold.inference.restraints.rows import refuse_lines
from fastfold.protein import residue_constants as rc

_STEP, _TWO_STEPS = 4.0, 7.6
"""Largest distances in Å of CA one and two residues apart: 3.8 and 7.3 in ideal geometry."""

_SIDE = 1.6  #: Largest distance of CA and CB in Å
_PEPTIDE_BOND = 1.5  #: Largest length of the bond of C and N in Å
_TO_NEXT = 2.5  #: Largest distance in Å of C and CA, and of CA and N, across the bond between residues

_CLOSEST: dict[Atoms, tuple[float, float]] = {"CA": (2.7, 3.3), "CB": (2.7, 3.0), "any": (1.2, 1.9)}
"""Smallest distances in Å of neighbours in a chain, and of other residues.

Neighbours: CA of cis peptides, and the peptide bond. Others: backbones in contact, and disulfides.
"""

_Path = tuple[float, tuple[int, ...]]


class _Edge(NamedTuple):
    """Largest distance of CA in Å to a residue, and the number of the restraint that says so; None for the chain."""

    residue: int
    length: float
    restraint: int | None


def chain_span(separation: int) -> float:
    """Return the largest distance in Å of CA atoms that are ``separation`` residues apart in a chain."""
    pairs, single = divmod(separation, 2)
    return pairs * _TWO_STEPS + single * _STEP


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
    sides = sum(_to_ca(place, one.atoms, residues) for place in (one.first, one.second))
    return smallest, chain_span(separation) + sides


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


def _contradictions(restraints: Sequence[Restraint], residues: Residues) -> list[str]:
    """Return a message for each restraint whose ``low`` other restraints exclude."""
    errors, reported = _of_same_pairs(restraints)
    if not any(one.low for one in restraints):
        return errors
    edges = _edges(restraints, residues)
    for one in restraints:
        # CB is at most this much nearer than CA; the closest atoms are never farther apart than CA.
        sides = 0.0
        if one.atoms == "CB":
            sides = sum(_to_ca(place, "CB", residues) for place in (one.first, one.second))
        shortest = _shortest_path(edges, one.first, one.second, one.low - sides)
        if shortest is not None and one not in reported:
            length, numbers = shortest
            lines = ", ".join(dict.fromkeys(restraints[number].line for number in numbers))
            errors.append(
                f"{one.line}: min {one.low:g} is too large: {lines} and the chain allow "
                f"{length + sides:.3g} Å or less; remove one of them"
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


def _edges(restraints: Sequence[Restraint], residues: Residues) -> dict[int, list[_Edge]]:
    """Return the largest distances of CA between residues of restraints, by residue.

    Those along a chain go up to the largest ``low``, beyond which no path is looked for.
    """
    edges: dict[int, list[_Edge]] = defaultdict(list)
    longest = max(one.low for one in restraints)
    places = sorted({place for one in restraints for place in (one.first, one.second)})
    for number, first in enumerate(places):
        for second in places[number + 1 :]:
            separation = residues.separation(first, second)
            if separation is None or (span := chain_span(separation)) > longest:
                break
            edges[first].append(_Edge(second, span, None))
            edges[second].append(_Edge(first, span, None))
    for number, one in enumerate(restraints):
        if math.isfinite(one.high):
            sides = sum(_to_ca(place, one.atoms, residues) for place in (one.first, one.second))
            edges[one.first].append(_Edge(one.second, one.high + sides, number))
            edges[one.second].append(_Edge(one.first, one.high + sides, number))
    return edges


def _shortest_path(edges: dict[int, list[_Edge]], start: int, end: int, limit: float) -> _Path | None:
    """Return length and restraints of the shortest path of less than ``limit`` Å; None without one."""
    queue: list[tuple[float, int, tuple[int, ...]]] = [(0.0, start, ())]
    visited: set[int] = set()
    while queue:
        length, residue, numbers = heapq.heappop(queue)
        if residue == end:
            return length, numbers
        if residue in visited:
            continue
        visited.add(residue)
        for edge in edges[residue]:
            total = length + edge.length
            if total < limit and edge.residue not in visited:
                via = numbers if edge.restraint is None else (*numbers, edge.restraint)
                heapq.heappush(queue, (total, edge.residue, via))
    return None
