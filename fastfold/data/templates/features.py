"""Features of one template: atoms at the residues of the query that they are aligned with."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date

import numpy as np

from fastfold.data.templates.database import MmcifFolder, parse_date
from fastfold.data.templates.entry import EntryChain, TemplateEntry
from fastfold.data.templates.hits import TemplateHit, TemplateSkipped
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.utils.packages import require_package

MAX_CA_DISTANCE = 150.0
"""Largest distance in Å of CA atoms of two neighbours; a chain with a larger one is left out."""
MIN_ATOMS = 5  #: Smallest number of atoms of a template; alanine has five


@dataclass(frozen=True, eq=False)
class Template:
    """Template at the ``N`` residues of the query."""

    name: str  #: ``<PDB id>_<chain>``, or the name of a user's structure
    sequence: str  #: ``N`` letters of the template, ``-`` for a gap
    positions: np.ndarray  #: ``[N, 37, 3]`` float32 in Å, zero where the mask is
    mask: np.ndarray  #: ``[N, 37]`` float32
    sum_probs: float  #: HHsearch's sum of posterior probabilities, 0 for other searches
    mapping: Mapping[int, int]  #: Place in the chain's whole sequence for each aligned residue of the query
    #: True if the chain has the listed sequence, exactly or except for ``X``; otherwise it was realigned
    exact: bool = True
    #: Number shared by the templates of other chains whose atoms are in one frame with these; 0 for a template of one
    #: chain
    frame: int = 0


@dataclass(frozen=True, eq=False)
class ForcedTemplate:
    """CA atoms of a template that the prediction of a chain keeps to."""

    name: str  #: Name of the template
    threshold: float  #: Largest deviation in Å
    positions: np.ndarray  #: ``[N, 3]`` float32 in Å, at the ``N`` residues of the chain
    mask: np.ndarray  #: ``[N]`` bool, True for residues with an atom


def template_of_hit(
    hit: TemplateHit, pdb_id: str, query: str, database: MmcifFolder, *, limit: date | None = None
) -> Template:
    """Read the structure of a hit.

    The chain is searched by name and sequence, then by sequence, then with ``X`` for any letter. If no chain has the
    listed sequence, the hit is realigned with the sequence of the chain of its name.

    Raises:
        TemplateSkipped: The hit cannot be a template; has the reason.
    """
    assert hit.pdb_chain is not None
    listed_chain = hit.pdb_chain[1]
    entry = database.entry(pdb_id)
    if not entry.sequences:
        raise TemplateSkipped("no chains", "its file contains no protein chain")
    _check_date(entry, limit)
    mapping, letters, exact = hit.mapping(), hit.letters, True
    match = find_chain(entry, listed_chain, letters)
    if match is not None:
        chain_id, offset = match
        places = {mine: theirs + offset for mine, theirs in mapping.items()}
        shown = {mine: letters[theirs] for mine, theirs in mapping.items()}
    else:
        if listed_chain not in entry.sequences:
            names = ", ".join(entry.sequences)
            raise TemplateSkipped(
                "not found", f"its file lacks the protein chain {listed_chain!r}, and has {names}"
            )
        chain_id, exact = listed_chain, False
        sequence = entry.sequences[chain_id]
        realigned = map_to_sequence(letters, sequence, name=f"{pdb_id}_{chain_id}")
        places = {mine: realigned[theirs] for mine, theirs in mapping.items() if theirs in realigned}
        if database.official_errors:
            places |= {mine: len(sequence) - 1 for mine, theirs in mapping.items() if theirs not in realigned}
        shown = {mine: sequence[place] for mine, place in places.items()}
    try:
        chain = entry.chain(chain_id)
    except InputError as error:
        raise TemplateSkipped("unreadable", str(error)) from None
    return place_template(
        chain,
        places,
        shown,
        len(query),
        name=f"{pdb_id}_{chain_id}",
        sum_probs=hit.sum_probs or 0.0,
        exact=exact,
    )


def place_template(
    chain: EntryChain,
    places: Mapping[int, int],
    letters: Mapping[int, str],
    length: int,
    *,
    name: str,
    sum_probs: float = 0.0,
    exact: bool = True,
) -> Template:
    """Assign the atoms of a chain to the ``length`` residues of the query.

    Each aligned residue of the query has its residue of the chain in ``places``, and the template's letter in
    ``letters``. For the other arguments see :class:`Template`.

    Raises:
        TemplateSkipped: Neighbours in the chain are too far apart, or there are too few atoms.
    """
    _check_distances(chain)
    positions = np.zeros((length, rc.atom_type_num, 3), np.float32)
    mask = np.zeros((length, rc.atom_type_num), np.float32)
    mine, theirs = list(places), list(places.values())
    positions[mine], mask[mine] = chain.positions[theirs], chain.mask[theirs]
    if mask.sum() < MIN_ATOMS:
        raise TemplateSkipped(
            "no atoms", f"the aligned part has {int(mask.sum())} atoms, fewer than {MIN_ATOMS}"
        )
    sequence = "".join(letters.get(residue, "-") for residue in range(length))
    return Template(name, sequence, positions, mask, sum_probs, dict(places), exact)


def check_parts(template: Template, parts: Collection[int] | None) -> None:
    """Check that a template has atoms in the parts of a chain, residues from 0; None for a whole chain.

    Raises:
        TemplateSkipped: There are too few atoms.
    """
    count = MIN_ATOMS if parts is None else int(template.mask[sorted(parts)].sum())
    if count < MIN_ATOMS:
        raise TemplateSkipped(
            "no atoms", f"it has {count} atoms in the parts of the chain, fewer than {MIN_ATOMS}"
        )


def find_chain(entry: TemplateEntry, chain_id: str, letters: str) -> tuple[str, int] | None:
    """Return the chain with these letters, and their first place in it; None if there is none.

    The chain of the given name is checked first. If no chain matches exactly, ``X`` on either side matches any letter.
    """
    sequences = entry.sequences
    names = [chain_id] if chain_id in sequences else []
    for name in [*names, *sequences]:
        if letters in sequences[name]:
            return name, sequences[name].index(letters)
    pattern = re.compile("".join("." if letter == "X" else f"[{letter}X]" for letter in letters))
    for name, sequence in sequences.items():
        if match := pattern.search(sequence):
            return name, match.start()
    return None


def _check_distances(chain: EntryChain) -> None:
    """Check that CA atoms of neighbours are at most 150 Å apart."""
    ca = rc.atom_order["CA"]
    there = chain.mask[:, ca] > 0
    positions = chain.positions[:, ca].astype(np.float64)
    steps = np.linalg.norm(positions[1:] - positions[:-1], axis=-1)
    far = np.flatnonzero(there[1:] & there[:-1] & (steps > MAX_CA_DISTANCE))
    if far.size:
        at = int(far[0])
        raise TemplateSkipped(
            "broken",
            f"residues {at + 1} and {at + 2} of its chain are {steps[at]:.0f} Å apart, more than {MAX_CA_DISTANCE:.0f}",
        )


def _check_date(entry: TemplateEntry, limit: date | None) -> None:
    """Check the file's own date, which is needed only with a limit."""
    if limit is None:
        return
    released = parse_date(entry.release_date)
    if released is None:
        raise TemplateSkipped("no date", "its file has no release date, which the limit of dates needs")
    if released > limit:
        raise TemplateSkipped("late", f"released on {released}, after {limit}")


MIN_IDENTITY = 0.9  #: Smallest share of equal residues in the shorter sequence


def align_pair(first: str, second: str) -> tuple[str, str]:
    """Align two sequences with Kalign 3; gaps are ``-``."""
    require_package("kalign-python", "aligning a template whose file has another sequence")
    import kalign

    aligned = kalign.align([first, second], seq_type="protein", n_threads=1)
    return aligned[0], aligned[1]


def map_to_sequence(
    listed: str, actual: str, *, name: str, min_identity: float = MIN_IDENTITY
) -> dict[int, int]:
    """Map a listed sequence's residues to their places in the actual sequence.

    ``min_identity`` is the smallest share of equal residues in the shorter one.

    Raises:
        TemplateSkipped: Fewer of the shorter one's residues are equal.
    """
    mapping: dict[int, int] = {}
    same = mine = theirs = 0
    for a, b in zip(*align_pair(listed, actual), strict=True):
        if a != "-" and b != "-":
            mapping[mine] = theirs
            same += a == b
        mine += a != "-"
        theirs += b != "-"
    share = same / min(len(listed), len(actual))
    if share < min_identity:
        raise TemplateSkipped(
            "other sequence",
            f"the sequence of {name} in its file differs: {share:.0%} of the residues are equal, expected at least "
            f"{min_identity:.0%}",
        )
    return mapping
