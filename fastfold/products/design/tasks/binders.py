"""Binders of given chains: new ones, redesigned ones, motifs in a binder, and loops of a framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from fastfold.data.targets import structure_chains
from fastfold.errors import ConfigError, InputError
from fastfold.products.design.config import SHORTEST_BINDER, Flexible
from fastfold.products.design.tasks.given import TargetStructure, check_flexible, residue_places
from fastfold.products.design.tasks.layout import (
    DesignedChain,
    chain_with_loops,
    draw_numbers,
    new_chain,
    parse_range,
    read_contigs,
)
from fastfold.products.design.tasks.protocols import assemble, chains_of_contigs, copied, redesigned_chains
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein.io.observed import BINDING_SITE, MOTIF, ObservedStructure, read_logged
from fastfold.protein.protein import chain_name


@dataclass(frozen=True)
class BinderParts:
    """Given residues of a binder: chains to redesign, parts of the file, or a framework with loops.

    Example:
        >>> from fastfold.products.design import BinderParts
        >>> BinderParts(contigs="10-20/B16-36/5").is_empty
        False
    """

    redesign: tuple[str, ...] = ()  #: Chains of the structure that are designed again
    keep: str = ""  #: Residues of these chains whose type stays, such as ``B5-9``
    #: Parts of the binder: numbers of new residues, and residues of the structure (``10-20/B16-36/5``)
    contigs: str = ""
    framework: Path | None = None  #: PDB or mmCIF file of chains whose loops are designed
    #: Loops of the framework, with other lengths after ``=``: ``H:26-33,H:95-102=8-14``
    loops: str = ""
    #: Parts of the binder's template that are left out; None for no template, and a whole one of a framework
    flexible: Flexible | None = None

    def __post_init__(self) -> None:
        chosen = [name for name in ("redesign", "contigs", "framework") if getattr(self, name)]
        if len(chosen) > 1:
            raise ConfigError(f"`{chosen[0]}` and `{chosen[1]}` exclude each other; leave out one of them")
        if bool(self.loops) != (self.framework is not None):
            raise ConfigError("`framework` and `loops` belong together; give both, such as H:26-33,L:24-34")
        if self.keep and not self.redesign:
            raise ConfigError("`keep` needs `redesign`, which is missing; residues of `contigs` stay as well")
        if self.flexible is not None:
            check_flexible(self.flexible)
            if self.is_empty:
                raise ConfigError("a new binder has no template; give `redesign`, `contigs` or `framework`")

    @property
    def is_empty(self) -> bool:
        """True for a binder of new residues alone."""
        return not (self.redesign or self.contigs or self.framework)


def binder(
    path: Path,
    length: int | tuple[int, int] | None = None,
    *,
    chains: Sequence[str] = (),
    hotspots: str = "",
    parts: BinderParts | None = None,
    copies: int = 1,
    repeats: int = 1,
    flexible: Flexible = "none",
    others: Sequence[TargetStructure] = (),
    avoided: Sequence[TargetStructure] = (),
    cyclic: bool = False,
    seed: int = 0,
) -> DesignTask:
    """Design a chain that binds given ones, whose structure is a template.

    Args:
        path: PDB or mmCIF file of the bound protein.
        length: Residues of the binder, or of a repeat; a range of lengths for ``contigs``.
        chains: Chain names to bind; empty for all that are not part of the binder.
        hotspots: Residues to touch, such as ``A10-25,B40``; empty for any.
        parts: Given residues of the binder; None for new residues alone.
        copies: Equal binder chains; of redesigned chains, groups of them that get the same sequences.
        repeats: Equal parts of a new binder.
        flexible: Parts of the given chains' templates that are left out.
        others: Further targets of the same binder.
        avoided: Off-targets, which it shall not touch; at their hotspots if they have some.
        cyclic: True for a ring.
        seed: Seed of the lengths that contigs and loops leave open.

    Raises:
        InputError: The file, a chain or a residue cannot be used.
        ConfigError: The length is out of range, or parts of the binder cannot be used.

    Example:
        >>> import fastfold
        >>> from pathlib import Path
        >>> from fastfold.products.design import binder
        >>> _ = Path("bound.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> task = binder(Path("bound.pdb"), 20, hotspots="A3-5")
        >>> [len(chain.sequence) for chain in task.target.chains], task.hotspots.tolist()
        ([10, 20], [2, 3, 4])
    """
    parts = parts or BinderParts()
    check_flexible(flexible)
    if copies > 1 and parts.contigs:
        raise ConfigError("`contigs` holds a motif at one place of the target; leave out `copies`")
    structure = read_logged(path, BINDING_SITE, chain_ids=(*chains, *parts.redesign) if chains else ())
    bound = _bound_chains(structure, chains, parts, path)
    used_names = [chain.id for chain in structure_chains(bound)]
    designed = _designed_chains(
        parts, structure, used_names, path, length=length, copies=copies, repeats=repeats, seed=seed
    )
    if cyclic and any(one.chain.has_gap for one in designed):
        raise ConfigError(
            "`cyclic` closes whole chains, and a part of the binder lacks residues; leave out one of them"
        )
    own_flexible = parts.flexible or ("none" if parts.framework else "free")
    # Of a framework, the loops are to touch the target.
    paratope = np.concatenate([(one.rows >= 0) & bool(parts.framework) for one in designed])

    def bind(target: ObservedStructure, spots: str, file: Path, own: Sequence[DesignedChain]) -> DesignTask:
        residues = sum(map(len, target.chains))
        weights = {"plddt": 0.1, "i_con": 1.0} | ({} if parts.is_empty else {"dgram_cce": 1.0})
        return assemble(
            "binder",
            own,
            {"dgram_cce": 1.0} if parts.redesign else weights,
            bound=target,
            tied=copies,
            is_summed=bool(parts.redesign),
            hotspots=residue_places(spots, target.chains, file),
            paratope=np.flatnonzero(paratope) + residues,
            templates=[*target.chains, *(one.observed for one in own)],
            cyclic=cyclic,
            flexible=flexible,
            own_flexible=own_flexible,
        )

    def bound_to(other: TargetStructure) -> DesignTask:
        target = read_logged(other.path, BINDING_SITE, chain_ids=other.chains)
        # Only the first target is in the frame of the binder's given residues.
        own = _renamed([replace(one, frame=one.frame + 1) for one in designed], target)
        return bind(target, other.hotspots, other.path, own)

    task = bind(bound, hotspots, path, designed)
    return replace(task, others=[bound_to(one) for one in others], avoided=[bound_to(one) for one in avoided])


def _bound_chains(
    structure: ObservedStructure, chains: Sequence[str], parts: BinderParts, path: Path
) -> ObservedStructure:
    """Return the given chains that a binder binds."""
    names = [chain.chain_id for chain in structure.chains]
    if missing := sorted(set(parts.redesign) - set(names)):
        raise InputError(f"has no chain {missing[0]!r} to redesign, only {', '.join(names)}", path=path)
    if both := sorted(set(parts.redesign) & set(chains)):
        raise ConfigError(f"chain {both[0]} is in both `chains` and `redesign`; leave it out of one")
    left = [one for one in structure.chains if one.chain_id not in parts.redesign]
    if parts.contigs and not chains:
        read = read_contigs(parts.contigs, structure.chains, path)
        kept = np.concatenate([part for part in read if isinstance(part, np.ndarray)])
        number = np.repeat(np.arange(len(structure.chains)), [len(one) for one in structure.chains])
        left = [one for i, one in enumerate(structure.chains) if i not in number[kept]]
    if not left:
        raise ConfigError(f"no chain of {path} is left to bind; name chains of it with `chains`")
    return replace(structure, chains=tuple(left))


def _designed_chains(
    parts: BinderParts,
    structure: ObservedStructure,
    used_names: Sequence[str],
    path: Path,
    *,
    length: int | tuple[int, int] | None,
    copies: int,
    repeats: int,
    seed: int,
) -> list[DesignedChain]:
    """Return the chains of a binder; ``used_names`` are the names of the given ones."""
    free = next(name for name in map(chain_name, count()) if name not in used_names)
    if repeats > 1 and not parts.is_empty:
        raise ConfigError("`repeats` belongs to new binders; leave it out")
    if parts.contigs:
        # Residues of the binder may be in chains that are not bound.
        whole = read_logged(path, MOTIF)
        total = (length, length) if isinstance(length, int) else length
        return chains_of_contigs(
            parts.contigs, whole.chains, path, free, copies=copies, length=total, seed=seed, is_bound=True
        )
    if length is not None and not parts.is_empty:
        raise ConfigError("`length` belongs to new binders and `contigs`; leave it out")
    if parts.redesign:
        own = [one for one in structure.chains if one.chain_id in parts.redesign]
        kept = residue_places(parts.keep, own, path)
        return redesigned_chains(replace(structure, chains=tuple(own)), kept)
    if parts.framework is not None:
        first = _framework(parts, seed)
        groups = [[replace(one, frame=number + 1) for one in first] for number in range(copies)]
        return _renamed([one for group in groups for one in group], structure)
    if not isinstance(length, int) or length * repeats < SHORTEST_BINDER:
        raise ConfigError(f"expected a binder of {SHORTEST_BINDER} residues or more, found {length}")
    return copied(new_chain(free, length, repeats=repeats), copies, used_names=(*used_names, free))


def _framework(parts: BinderParts, seed: int) -> list[DesignedChain]:
    assert parts.framework is not None
    path = parts.framework
    structure = read_logged(path, MOTIF)
    starts = np.cumsum([0, *map(len, structure.chains)])
    loops: list[tuple[int, np.ndarray]] = []
    ranges: list[tuple[int, int]] = []
    for word in filter(None, (one.strip() for one in parts.loops.split(","))):
        name, _, size = word.partition("=")
        places = residue_places(name, structure.chains, path)
        number = int(np.searchsorted(starts, places[0], "right")) - 1
        own = places - starts[number]
        index = structure.chains[number].residue_index
        span = int(index[own[-1]] - index[own[0]]) + 1
        wanted = parse_range(size) if size else (span, span)
        if wanted is None or wanted[0] < 1:
            raise ConfigError(f"`loops`: expected a length or a range such as H:95-102=8-14, found {word!r}")
        loops.append((number, own))
        ranges.append(wanted)
    for number, chain in enumerate(structure.chains):
        used = np.concatenate([own for index, own in loops if index == number] or [np.zeros(0, int)])
        if len(used) != len(set(used.tolist())) or len(used) == len(chain):
            raise ConfigError(f"`loops`: {parts.loops!r} overlap, or leave nothing of chain {chain.chain_id}")
    drawn = draw_numbers(ranges, seed)
    sized = [(number, own, size) for (number, own), size in zip(loops, drawn, strict=True)]
    return [
        chain_with_loops(one, chain, [(own, size) for index, own, size in sized if index == number], frame=1)
        for number, (one, chain) in enumerate(zip(structure_chains(structure), structure.chains, strict=True))
    ]


def _renamed(designed: Sequence[DesignedChain], structure: ObservedStructure) -> list[DesignedChain]:
    """Return designed chains with free names in place of those of a structure or of earlier chains."""
    used_names = [chain.id for chain in structure_chains(structure)]
    made = []
    for one in designed:
        name = one.chain.id
        if name in used_names:
            name = next(free for free in map(chain_name, count()) if free not in used_names)
        used_names.append(name)
        made.append(replace(one, chain=replace(one.chain, id=name)))
    return made
