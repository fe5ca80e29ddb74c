"""Protocols without given chains: hallucination, fixed backbones, and motifs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastfold.data.targets import structure_chains
from fastfold.data.templates.whole.given import with_virtual_cb
from fastfold.errors import ConfigError, InputError
from fastfold.products.design.tasks.given import residue_places
from fastfold.products.design.tasks.layout import (
    DesignedChain,
    chain_of_parts,
    draw_numbers,
    given_chain,
    new_chain,
    read_contigs,
)
from fastfold.products.design.tasks.task import DesignTask, Reference, is_small_ring, make_target
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import (
    FIXED_BACKBONE,
    MOTIF,
    ObservedChain,
    ObservedStructure,
    Purpose,
    check_backbone,
    read_logged,
)
from fastfold.protein.protein import chain_name

_RING_WEIGHTS = {"pae": 1.0, "plddt": 1.0, "con": 0.5}
"""Weights of ColabDesign's protocol for rings (``af_cyc_design``), for those that are too small for ``CONTACTS``."""


def hallucination(length: int, *, copies: int = 1, repeats: int = 1, cyclic: bool = False) -> DesignTask:
    """Design a protein of a length without a given structure.

    Args:
        length: Residues of a chain, or of a repeat.
        copies: Chains with the same sequence.
        repeats: Equal parts of each chain.
        cyclic: True for rings.

    Raises:
        ConfigError: Length, copies or repeats are out of range.

    Example:
        >>> from fastfold.products.design import hallucination
        >>> task = hallucination(60, copies=2)
        >>> [len(chain.sequence) for chain in task.target.chains]
        [60, 60]
    """
    if length * repeats < 10 or min(length, copies, repeats) < 1:
        raise ConfigError(
            f"expected a length from 10 and copies from 1, found {length * repeats} and {copies}"
        )
    weights = _RING_WEIGHTS if cyclic and is_small_ring(length * repeats) else {"con": 1.0}
    weights = weights | ({"i_con": 1.0} if copies > 1 else {})
    chains = [new_chain(chain_name(number), length, repeats=repeats) for number in range(copies)]
    return assemble("hallucinate", chains, weights, tied=copies, cyclic=cyclic)


def fixed_backbone(
    path: Path, *, chain: str | Sequence[str] | None = None, keep: str = "", copies: int = 1, repeats: int = 1
) -> DesignTask:
    """Design a sequence for the backbone of a chain, or of several.

    Args:
        path: PDB or mmCIF file.
        chain: Chain names; needed if the file has several.
        keep: Residues whose type stays, such as ``A10-25,A40``.
        copies: Groups of chains, in their order, that get the same sequences.
        repeats: Equal parts of each chain.

    Raises:
        InputError: The file or a residue cannot be used.
        ConfigError: All residues are kept, or chains that shall be equal differ in length or kept residues.

    Example:
        >>> import fastfold
        >>> from pathlib import Path
        >>> from fastfold.products.design import fixed_backbone
        >>> _ = Path("backbone.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> task = fixed_backbone(Path("backbone.pdb"), keep="A1-3")
        >>> len(task.source), task.source.tolist().count(-1)
        (10, 3)
    """
    structure = _read_chains(path, chain, FIXED_BACKBONE)
    kept = residue_places(keep, structure.chains, path)
    total = sum(map(len, structure.chains))
    if len(kept) == total:
        raise ConfigError(f"all {total} residues of {path} are kept; leave at least one to design")
    chains = redesigned_chains(structure, kept, repeats=repeats)
    return assemble("fixbb", chains, {"dgram_cce": 1.0}, tied=copies, source=structure.name)


def partial(
    path: Path,
    motif: str = "",
    *,
    chain: str | None = None,
    contigs: str = "",
    copies: int = 1,
    length: tuple[int, int] | None = None,
    seed: int = 0,
) -> DesignTask:
    """Design everything around a motif, whose structure and residue types stay.

    Args:
        path: PDB or mmCIF file.
        motif: Residues, such as ``A10-25,A40``, in the chain of the file.
        chain: Chain name; needed for ``motif`` if the file has several.
        contigs: Parts of a new chain in place of ``motif``: numbers of new residues, and residues of the file, such as
            ``10-20/A16-36/5``.
        copies: Chains with the same parts and sequence, of ``contigs``.
        length: Smallest and largest length of ``contigs``; None for any.
        seed: Seed of the lengths that ``contigs`` leaves open.

    Raises:
        InputError: The file or a residue cannot be used.
        ConfigError: The motif is empty or the whole chain, or the contigs cannot be read.

    Example:
        >>> import fastfold
        >>> from pathlib import Path
        >>> from fastfold.products.design import partial
        >>> _ = Path("motif.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> task = partial(Path("motif.pdb"), "A3-7")
        >>> task.source.tolist().count(-1)
        5
        >>> partial(Path("motif.pdb"), contigs="4/A3-7/6").target.chains[0].sequence
        'GGGGYKLILGGGGGG'
    """
    weights = {"dgram_cce": 1.0, "con": 1.0}
    if bool(motif) and bool(contigs):
        raise ConfigError("`motif` and `contigs` exclude each other; leave out one of them")
    if contigs:
        structure = read_logged(path, MOTIF)
        made = chains_of_contigs(
            contigs, structure.chains, path, "A", copies=copies, length=length, seed=seed
        )
        weights = weights | ({"i_con": 1.0} if copies > 1 else {})
        return assemble("partial", made, weights, tied=copies, source=structure.name)
    if copies > 1 or length is not None:
        raise ConfigError("`copies` and `length` belong to `contigs`; a motif keeps the length of its chain")
    structure = _read_chains(path, chain, MOTIF)
    if len(structure.chains) > 1:
        raise ConfigError(f"a motif is in one chain, found chains {', '.join(_names(structure))}")
    kept = residue_places(motif, structure.chains, path)
    chain_id, total = structure.chains[0].chain_id, len(structure.chains[0])
    if not 0 < len(kept) < total:
        raise ConfigError(
            f"expected a motif of 1 to {total - 1} residues of {path}, found {len(kept)}; name residues such as "
            f"{chain_id}10-25"
        )
    check_backbone(structure.chains, replace(MOTIF, needs_every_residue=True), path=path, residues=kept)
    (whole,) = structure_chains(structure)
    made = [given_chain(whole, structure.chains[0], kept, compared=kept)]
    return assemble("partial", made, weights, source=structure.name)


def chains_of_contigs(
    contigs: str,
    chains: Sequence[ObservedChain],
    path: Path,
    name: str,
    *,
    copies: int = 1,
    length: tuple[int, int] | None = None,
    seed: int = 0,
    is_bound: bool = False,
) -> list[DesignedChain]:
    """Return equal chains of contigs, with drawn lengths; the first is called ``name``.

    ``is_bound`` is True if the residues of the file are where a binder shall have them. Other arguments and errors are
    those of :func:`partial`.
    """
    parts = read_contigs(contigs, chains, path)
    ranges = [part for part in parts if isinstance(part, tuple)]
    kept = np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    for number, one in enumerate(chains):
        start = sum(map(len, chains[:number]))
        own = kept[(kept >= start) & (kept < start + len(one))] - start
        if len(own):
            check_backbone([one], replace(MOTIF, needs_every_residue=True), path=path, residues=own)
    drawn = iter(draw_numbers(ranges, seed, fixed=len(kept), total=length))
    fixed = [next(drawn) if isinstance(part, tuple) else part for part in parts]
    first = chain_of_parts(name, fixed, chains, frame=0 if is_bound else 1)
    return copied(first, copies, used_names=(name,))


def copied(chain: DesignedChain, copies: int, *, used_names: Sequence[str]) -> list[DesignedChain]:
    """Return a chain and equal ones, each with a frame of its own and the next name that is not ``used_names``."""
    free = (name for name in map(chain_name, range(10**6)) if name not in used_names)
    more = [
        replace(chain, chain=replace(chain.chain, id=next(free)), frame=chain.frame + number)
        for number in range(1, copies)
    ]
    return [chain, *more]


def redesigned_chains(
    structure: ObservedStructure, kept: np.ndarray, *, repeats: int = 1
) -> list[DesignedChain]:
    """Return all chains of a structure, whose residues are designed but those at joined places ``kept [K]``."""
    starts = np.cumsum([0, *map(len, structure.chains)])
    return [
        given_chain(chain, one, kept[(kept >= start) & (kept < start + len(one))] - start, repeats=repeats)
        for chain, one, start in zip(structure_chains(structure), structure.chains, starts, strict=False)
    ]


def assemble(
    name: str,
    designed: Sequence[DesignedChain],
    weights: Mapping[str, float],
    *,
    bound: ObservedStructure | None = None,
    tied: int = 1,
    source: str = "",
    is_summed: bool = False,
    **fields: Any,
) -> DesignTask:
    """Return a task of chains, the given ones first.

    Args:
        name: Name of the protocol.
        designed: Designed chains.
        weights: Default weights of losses.
        bound: Given chains that a binder binds; None for none.
        tied: Groups of designed chains, in their order, that get the same sequences.
        source: Name of the file.
        is_summed: True if losses against given atoms are sums over partners.
        fields: Further fields of the task.

    Raises:
        ConfigError: Chains that shall be equal differ in length or kept residues.
    """
    target_chains = () if bound is None else bound.chains
    chains = [*(() if bound is None else structure_chains(bound)), *(one.chain for one in designed)]
    count, rest = divmod(len(designed), tied)
    for number, one in enumerate(designed):
        partner = designed[number % count] if count and not rest else None
        if partner is None or partner.rows.tolist() != one.rows.tolist():
            raise ConfigError(
                f"{tied} copies need groups of chains with equal lengths and equal kept residues, found "
                + ", ".join(f"{one.chain.id} of {len(one.rows)} residues" for one in designed)
            )
    first = np.cumsum([0, *(one.rows.max(initial=-1) + 1 for one in designed[:count])])
    rows = [
        np.where(one.rows >= 0, one.rows + first[number % count], -1) for number, one in enumerate(designed)
    ]
    source_rows = np.concatenate([np.full(sum(map(len, target_chains)), -1), *rows])
    if source_rows.max(initial=-1) < 0:
        raise ConfigError(f"{name}: all residues are kept; leave at least one to design")
    atoms = None
    if bound is not None:
        ca = rc.atom_order["CA"]
        known = [np.where(one.mask[:, ca, None] > 0.5, one.positions[:, ca], np.nan) for one in target_chains]
        atoms = np.concatenate([*known, np.full((sum(map(len, rows)), 3), np.nan)])
    return DesignTask(
        name,
        make_target(name, chains, source if bound is None else bound.name),
        source_rows,
        weights,
        reference=_reference(target_chains, designed, is_summed),
        own_chains=range(len(target_chains), len(chains)),
        copies=tied,
        bound_ca=atoms,
        **fields,
    )


def _reference(
    bound: Sequence[ObservedChain], designed: Sequence[DesignedChain], is_summed: bool
) -> Reference | None:
    """Return the given atoms of designed chains, with those of given chains; None without any."""
    if all(one.observed is None for one in designed):
        return None
    parts = [_given_atoms(chain, 0) for chain in bound]
    for one in designed:
        if one.observed is not None and one.is_kept is not None:
            parts.append(_given_atoms(one.observed, one.frame, one.is_kept))
            continue
        length = len(one.rows)
        absent = np.zeros((length, rc.atom_type_num, 3), np.float32)
        unknown = rc.sequence_to_aatype("X" * length)
        parts.append((absent, absent[..., 0], unknown, np.zeros(length), np.full(length, one.frame)))
    positions, mask, aatype, rows, frame = (
        torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True)
    )
    return Reference(positions, mask.float(), aatype.long(), rows.float(), frame, is_summed)


def _given_atoms(
    chain: ObservedChain, frame: int, kept: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays of a :class:`.Reference` for a given chain; residues ``kept [L]`` bool are compared."""
    # As in ColabDesign, glycines have a CB, so that other residues in their place are compared with it.
    whole = with_virtual_cb(chain)
    aatype, frames = rc.sequence_to_aatype(whole.sequence), np.full(len(chain), frame)
    if kept is None:
        return whole.positions, whole.mask, aatype, np.zeros(len(chain)), frames
    return whole.positions, whole.mask * kept[:, None], aatype, kept.astype(float), frames


def _names(structure: ObservedStructure) -> list[str]:
    return [chain.chain_id for chain in structure.chains]


def _read_chains(path: Path, name: str | Sequence[str] | None, purpose: Purpose) -> ObservedStructure:
    """Read chains of a structure, which must be named if there are several."""
    chain_ids = (name,) if isinstance(name, str) else tuple(name or ())
    structure = read_logged(path, purpose, chain_ids=chain_ids)
    if len(structure.chains) > 1 and not chain_ids:
        raise InputError(f"has chains {', '.join(_names(structure))}; choose one with `chains`", path=path)
    return structure
