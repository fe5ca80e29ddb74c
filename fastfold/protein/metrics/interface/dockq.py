"""DockQ of the interfaces of a complex, as version 2 of the DockQ program defines it.

Basu & Wallner 2016 (doi:10.1371/journal.pone.0161879) and Mirabello & Wallner 2024
(doi:10.1093/bioinformatics/btae586). Interfaces are those of the reference: pairs of chains with residues under 5 Å.
Residues count if both structures have the same type there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import torch

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.chain_mapping import ChainCandidates, ChainMap
from fastfold.protein.metrics.tm_score import superpose
from fastfold.protein.protein import Protein

CONTACT_DISTANCE = 5.0  #: Residues touch if heavy atoms are under this distance, in Å

INTERFACE_DISTANCE = 10.0  #: Residues of the interface, whose backbone iRMSD superposes, in Å

_IRMSD_SCALE, _LRMSD_SCALE = 1.5, 8.5
_BACKBONE = [rc.atom_order[name] for name in ("N", "CA", "C", "O")]
_MAX_TRIED = 5040  #: Largest number of mappings that are all scored, that of seven copies of a chain
_MARGIN = 1e-9


@dataclass(frozen=True)
class InterfaceQuality:
    """Quality of a predicted interface of two chains.

    Deviations in Å are None if the structures share no backbone atom there; then they add nothing to ``dockq``.
    """

    chains: tuple[int, int]  #: Numbers of the chains in the reference
    predicted_chains: tuple[int, int]  #: Numbers of their chains in the prediction
    dockq: float  #: Mean of ``fnat`` and the two scaled deviations, 0 to 1
    fnat: float  #: Share of the reference's contacts that the prediction has
    f1: float  #: Harmonic mean of that share and the share of predicted contacts that the reference has
    irmsd: float | None  #: RMSD of the interface's backbone, superposed on itself
    lrmsd: float | None  #: RMSD of the smaller chain's backbone, with the larger chain superposed
    contacts: int  #: Number of contacts in the reference


@dataclass(frozen=True)
class ComplexQuality:
    """DockQ of a complex."""

    mapping: ChainMap  #: Mapping of chains with the largest sum of ``dockq``
    interfaces: tuple[InterfaceQuality, ...]  #: Interfaces of the reference between mapped chains

    @property
    def dockq(self) -> float | None:
        """Mean over the interfaces (GlobalDockQ); None without an interface."""
        values = [one.dockq for one in self.interfaces]
        return sum(values) / len(values) if values else None


def complex_dockq(
    prediction: Protein, reference: Protein, candidates: ChainCandidates, mapping: ChainMap
) -> ComplexQuality:
    """Score all interfaces under the mapping of chains with the largest sum of DockQ.

    All mappings are tried if there are at most 5040, as of seven copies. Of more, chains of ``mapping`` are exchanged
    while the sum increases. Of equal mappings the first is kept, and ``mapping`` comes first.
    """
    complexes = _Complexes(prediction, reference, candidates)

    def total(one: ChainMap) -> float:
        return sum(interface.dockq for interface in complexes.interfaces(one))

    if candidates.count <= _MAX_TRIED:
        # Equal sums differ by rounding errors.
        best = max((mapping, *candidates.mappings()), key=lambda one: round(total(one), 9))
        return ComplexQuality(best, tuple(complexes.interfaces(best)))
    best, improves = mapping, True
    while improves:
        largest, improves = total(best), False
        for trial in _exchanges(best, candidates):
            if total(trial) > largest + _MARGIN:
                best, improves = trial, True
                break
    return ComplexQuality(best, tuple(complexes.interfaces(best)))


def _exchanges(mapping: ChainMap, candidates: ChainCandidates) -> Iterable[ChainMap]:
    """Yield mappings with the chains of two pairs exchanged."""
    for (a, one), (b, other) in combinations(enumerate(mapping), 2):
        turned = (one[0], other[1]), (other[0], one[1])
        if all(pair in candidates.residues for pair in turned):
            rest = [pair for number, pair in enumerate(mapping) if number not in (a, b)]
            yield tuple(sorted([*rest, *turned], key=lambda pair: pair[1]))


class _Complexes:
    """Two complexes, with the contacts and scores of their pairs of chains computed once."""

    def __init__(self, prediction: Protein, reference: Protein, candidates: ChainCandidates) -> None:
        self._prediction, self._reference = prediction, reference
        self._seen = [protein.atom_mask.max(-1) > 0.5 for protein in (prediction, reference)]
        self._rows: dict[tuple[int, int], np.ndarray] = {}
        for pair, rows in candidates.residues.items():
            ours, theirs = rows.T
            same = prediction.aatype[ours] == reference.aatype[theirs]
            self._rows[pair] = rows[same & self._seen[0][ours] & self._seen[1][theirs]]
        self._native = cache(lambda a, b: chain_distances(reference, a, b))
        self._model = cache(lambda a, b: chain_distances(prediction, a, b))
        self._score = cache(self._interface)

    def interfaces(self, mapping: ChainMap) -> list[InterfaceQuality]:
        """Return the scores of all interfaces under a mapping."""
        # The order of equally long chains decides which one is superposed; the program takes the complex with fewer.
        fewer = len(self._prediction.chains) < len(self._reference.chains)
        ordered = sorted(mapping) if fewer else mapping
        scores = (self._score(one, other) for one, other in combinations(ordered, 2))
        return [score for score in scores if score is not None]

    def _interface(self, one: tuple[int, int], other: tuple[int, int]) -> InterfaceQuality | None:
        """Score an interface of two pairs of chains; None without a contact in the reference."""
        native = self._native(one[1], other[1])
        contacts = int((native < CONTACT_DISTANCE).sum())
        if contacts == 0:
            return None
        rows = self._rows[one], self._rows[other]
        ours, theirs = zip(*((part[:, 0], part[:, 1]) for part in rows), strict=True)
        starts = [self._reference.chains[pair[1]].start for pair in (one, other)]
        true = native[np.ix_(theirs[0] - starts[0], theirs[1] - starts[1])]
        starts = [self._prediction.chains[pair[0]].start for pair in (one, other)]
        model = self._model(one[0], other[0])[np.ix_(ours[0] - starts[0], ours[1] - starts[1])]
        predicted, wanted = model < CONTACT_DISTANCE, true < CONTACT_DISTANCE
        right, wrong = int((predicted & wanted).sum()), int((predicted & ~wanted).sum())

        near = true < INTERFACE_DISTANCE
        if near.any():
            inside = np.concatenate([rows[0][near.any(1)], rows[1][near.any(0)]])
        else:
            inside = np.concatenate(rows)
        sizes = [int(self._seen[1][self._reference.chains[pair[1]]].sum()) for pair in (one, other)]
        large, small = rows if sizes[0] > sizes[1] else rows[::-1]
        irmsd, lrmsd = self._deviation(inside, inside), self._deviation(large, small)
        fnat = right / contacts
        scaled = _scaled(irmsd, _IRMSD_SCALE) + _scaled(lrmsd, _LRMSD_SCALE)
        return InterfaceQuality(
            chains=(one[1], other[1]),
            predicted_chains=(one[0], other[0]),
            dockq=(fnat + scaled) / 3.0,
            fnat=fnat,
            f1=2.0 * right / (right + wrong + contacts),
            irmsd=irmsd,
            lrmsd=lrmsd,
            contacts=contacts,
        )

    def _deviation(self, superposed: np.ndarray, scored: np.ndarray) -> float | None:
        """Return the RMSD in Å of some residues' backbone after superposing that of others."""
        moving, fixed = self._backbone(superposed)
        points, wanted = self._backbone(scored)
        if not len(moving) or not len(points):
            return None
        motion = superpose(moving, fixed, torch.ones(len(moving), dtype=torch.float64))
        return float((motion.apply(points) - wanted).square().sum(-1).mean().sqrt())

    def _backbone(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return common backbone atoms ``[A, 3]`` float64 in Å of the prediction and the reference."""
        index = rows[:, :1], np.array(_BACKBONE)[None]
        other = rows[:, 1:], np.array(_BACKBONE)[None]
        common = (self._prediction.atom_mask[index] > 0.5) & (self._reference.atom_mask[other] > 0.5)
        points = self._prediction.atom_positions[index][common], self._reference.atom_positions[other][common]
        first, second = (torch.from_numpy(one.astype(np.float64)) for one in points)
        return first, second


def _scaled(deviation: float | None, scale: float) -> float:
    return 0.0 if deviation is None else 1.0 / (1.0 + (deviation / scale) ** 2)


def chain_distances(protein: Protein, first: int, second: int) -> np.ndarray:
    """Return the smallest distance ``[n, m]`` in Å between heavy atoms of the residues of two chains.

    Infinite for residues without atoms, and for those that are farther than 10 Å by their boxes.
    """
    sides = [protein.chains[number] for number in (first, second)]
    nearest = np.full([side.stop - side.start for side in sides], np.inf)
    present = [protein.atom_mask[side] > 0.5 for side in sides]
    atoms = [protein.atom_positions[side].astype(np.float64) for side in sides]
    low = [np.where(has[..., None], x, np.inf).min(1) for x, has in zip(atoms, present, strict=True)]
    high = [np.where(has[..., None], x, -np.inf).max(1) for x, has in zip(atoms, present, strict=True)]
    gap = np.maximum(low[0][:, None] - high[1][None], low[1][None] - high[0][:, None])
    for i, j in np.argwhere((gap <= INTERFACE_DISTANCE).all(-1)).tolist():
        apart = atoms[0][i][present[0][i], None] - atoms[1][j][present[1][j]][None]
        nearest[i, j] = np.square(apart).sum(-1).min() ** 0.5
    return nearest
