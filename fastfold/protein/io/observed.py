"""Structures as targets: observed residues with an index that shows every gap, and the backbone that is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import without_bond
from fastfold.protein.io.read import log_warnings, read_structure
from fastfold.protein.structure import ChainStructure, Structure
from fastfold.utils.text_files import PathLike

BREAK_STEP: Final = 200
"""Step of the residue index at a break that the numbers do not show, as in dl_binder_design."""
_N, _CA, _C = (rc.atom_order[atom] for atom in ("N", "CA", "C"))


@dataclass(frozen=True)
class Purpose:
    """Use of a structure that needs its backbone."""

    what: str  #: Verb and object, after "cannot"
    needs_every_residue: bool = False  #: True if no residue may have CA alone
    of_others: str = "no network sees their backbone"  #: Consequence for residues without a backbone


FIXED_BACKBONE = Purpose("fix a backbone")
MOTIF = Purpose("hold a motif")
BINDING_SITE = Purpose("show a target")
SCORE = Purpose("score a structure")
TEMPLATE = Purpose("use a template")
INITIAL_GUESS = Purpose("start from a structure")
RELAXATION = Purpose("relax a structure", needs_every_residue=True)
COMPARISON = Purpose("compare with a structure", of_others="scores of all atoms leave them out")


@dataclass(frozen=True, eq=False)
class ObservedChain(ChainStructure):
    """Observed residues of a chain, whose residue index shows every gap."""

    whole: str = ""  #: Letters of all residues of the polymer, if some are left out; otherwise empty
    #: ``[N]`` int64, places of the residues in the polymer from 0, if some are left out
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class ObservedStructure(Structure):
    """Structure as a target."""

    chains: tuple[ObservedChain, ...]  #: The chains in the order of the file; at least one


def read_observed(
    source: Any, purpose: Purpose, *, chain_ids: Sequence[str] = (), whole: bool = False
) -> ObservedStructure:
    """Read a structure of a user: the residues with coordinates, in chains whose index shows every gap.

    The residue index is that of :func:`~fastfold.protein.io.read.read_structure`: the place in the sequence of the
    polymer if the file has it, otherwise the number in the file. Further gaps come from residues without a peptide
    bond. A warning tells of each chain with residues left out.

    Args:
        source: As of :func:`~fastfold.protein.io.read.read_structure`.
        purpose: Use of the structure, for messages.
        chain_ids: Chains to read, in the order of the file; none for all.
        whole: Return all residues of the polymers, as of :func:`all_residues`.

    Raises:
        InputError: A chain is missing or lacks the backbone that the purpose needs, or see
            :func:`~fastfold.protein.io.read.read_structure`.

    Example:
        >>> import fastfold
        >>> from pathlib import Path
        >>> from fastfold.protein.io.observed import SCORE, read_observed
        >>> lines = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb().splitlines(keepends=True)
        >>> kept = [line for line in lines if line.startswith("ATOM") and line[22:26].strip() not in ("5", "6")]
        >>> _ = Path("gap.pdb").write_text("".join(kept))
        >>> (chain,) = read_observed("gap.pdb", SCORE).chains
        >>> chain.residue_index.tolist()
        [1, 2, 3, 4, 7, 8, 9, 10]
    """
    structure = read_structure(source)
    path = source if isinstance(source, str | os.PathLike) else structure.name
    known = [chain.chain_id for chain in structure.chains]
    if missing := sorted(set(chain_ids) - set(known)):
        raise InputError(f"has no chain {missing[0]!r}, only {', '.join(known)}", path=path)
    chosen = [one for one in structure.chains if not chain_ids or one.chain_id in chain_ids]
    warnings = [*structure.warnings, *check_backbone(chosen, purpose, path=path)]
    chains = tuple(map(observed_chain, chosen))
    if whole:
        chains = tuple(map(all_residues, chains))
    for chain in chains:
        if left_out := max(len(chain.whole) - len(chain), 0):
            residues = f"{left_out} residue{'s' if left_out > 1 else ''}"
            warnings.append(
                f"Chain {chain.chain_id!r}: {residues} without coordinates left out; networks see the gaps."
            )
    return ObservedStructure(
        name=structure.name,
        chains=chains,
        resolution=structure.resolution,
        method=structure.method,
        release_date=structure.release_date,
        warnings=tuple(warnings),
        left_out=structure.left_out,
    )


def read_logged(
    source: Any, purpose: Purpose, *, chain_ids: Sequence[str] = (), whole: bool = False
) -> ObservedStructure:
    """Read a structure of a user and log the warnings; arguments and errors as of :func:`read_observed`."""
    structure = read_observed(source, purpose, chain_ids=chain_ids, whole=whole)
    log_warnings(structure.warnings, source)
    return structure


def check_backbone(
    chains: Sequence[ChainStructure],
    purpose: Purpose,
    *,
    path: PathLike,
    residues: np.ndarray | None = None,
) -> list[str]:
    """Return a warning for each chain with some residues of CA alone.

    Args:
        chains: The chains.
        purpose: Use of the structure.
        path: Path of the file, for messages.
        residues: Places of the residues of a single chain that the purpose needs; None for all.

    Raises:
        InputError: A chain lacks CA atoms, or the backbone that the purpose needs.
    """
    warnings = []
    for chain in chains:
        present = (chain.mask if residues is None else chain.mask[residues]) > 0.5
        has_ca, total = present[:, _CA], int(present[:, _CA].sum())
        if not total:
            raise InputError(f"chain {chain.chain_id!r} lacks CA atoms; remove the chain", path=path)
        alone = int((has_ca & (present.sum(1) == 1)).sum())
        bare = int((has_ca & ~(present[:, _N] & present[:, _C])).sum())
        count = alone if alone == bare or purpose.needs_every_residue else bare
        of = f" of chain {chain.chain_id!r}" if len(chains) > 1 else ""
        shortage = f"{count} of {total} residues{of} {'have CA alone' if count == alone else 'lack N or C'}"
        if count == total or (count and purpose.needs_every_residue):
            raise InputError(
                f"cannot {purpose.what}: {shortage}; give a structure with N, CA and C of its residues",
                path=path,
            )
        if count:
            warnings.append(f"{shortage}; {purpose.of_others}.")
    return warnings


def observed_chain(chain: ChainStructure) -> ObservedChain:
    """Return the observed residues of a chain, those with an atom, and their index with all gaps."""
    kept = np.flatnonzero((chain.mask > 0.5).any(1))
    is_whole = len(kept) == len(chain)
    observed = ObservedChain(
        chain_id=chain.chain_id,
        sequence="".join(chain.sequence[i] for i in kept),
        positions=chain.positions[kept],
        mask=chain.mask[kept],
        residue_index=chain.residue_index[kept],
        b_factors=chain.b_factors[kept],
        author_numbers=tuple(chain.author_numbers[i] for i in kept) if chain.author_numbers else (),
        residue_names=tuple(chain.residue_names[i] for i in kept) if chain.residue_names else (),
        has_sequence=chain.has_sequence,
        whole="" if is_whole else chain.sequence,
        places=kept[:0] if is_whole else kept,
    )
    return replace(observed, residue_index=gapped_index(observed))


def all_residues(chain: ObservedChain) -> ObservedChain:
    """Return a chain with all residues of the polymer.

    Those that were left out lack atoms, names and numbers.
    """
    if not chain.whole:
        return chain
    n, places = len(chain.whole), chain.places
    numbers, names = [""] * n, [""] * n
    for k, place in enumerate(places.tolist()):
        numbers[place], names[place] = chain.author_numbers[k], chain.residue_names[k]
    shape = (n, rc.atom_type_num)
    arrays = {"positions": np.zeros((*shape, 3), np.float32), "mask": np.zeros(shape, np.float32)}
    arrays["b_factors"] = np.zeros(shape, np.float32)
    for name, array in arrays.items():
        array[places] = getattr(chain, name)
    # The index of observed residues rises at least as fast as their places.
    last = np.searchsorted(places, np.arange(n), side="right") - 1
    index = np.where(
        last < 0, chain.residue_index[0] - places[0], (chain.residue_index - places)[last]
    ) + np.arange(n)
    return ObservedChain(
        chain_id=chain.chain_id,
        sequence=chain.whole,
        positions=arrays["positions"],
        mask=arrays["mask"],
        residue_index=index.astype(np.int32),
        b_factors=arrays["b_factors"],
        author_numbers=tuple(numbers),
        residue_names=tuple(names),
        has_sequence=True,
    )


def gapped_index(chain: ChainStructure) -> np.ndarray:
    """Return the residue index ``[N]`` int32 of observed residues, with gaps where no peptide bond joins neighbours.

    Neighbours by the index that are too far apart get the step of their numbers. If the numbers are consecutive, they
    get :data:`BREAK_STEP`, unless the file lists the polymer, which says that they are neighbours.
    """
    steps = np.diff(chain.residue_index)
    for i in np.flatnonzero((steps == 1) & without_bond(chain.positions, chain.mask)).tolist():
        before, after = (_number(chain, k) for k in (i, i + 1))
        if before is not None and after is not None and after - before > 1:
            steps[i] = after - before
        elif not chain.has_sequence:
            steps[i] = BREAK_STEP
    return np.cumsum([chain.residue_index[0], *steps]).astype(np.int32)


def _number(chain: ChainStructure, residue: int) -> int | None:
    match = re.match(r"-?\d+", chain.author_numbers[residue]) if chain.author_numbers else None
    return None if match is None else int(match[0])
