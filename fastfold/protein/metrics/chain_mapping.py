"""Mapping of chains between two structures, in which copies of a chain are exchangeable.

Chains correspond if their residues agree in at least 30% of the shorter one, by their best alignment or, where residue
numbers show gaps, by the numbers. Chains of one structure are copies
if they differ in at most 10% of their common residues; each set of copies is mapped to the most similar set of the
other structure. Among the copies the mapping with the largest TM-score of the whole complex is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.tm_score import superpose, tm_score, tm_score_scale

ChainMap = tuple[tuple[int, int], ...]
"""Chains of a prediction and their chains of the reference, by their numbers from 0, in the reference's order."""

_CORRESPONDING, _COPY = 0.3, 0.9
_MAX_TRIED = 24  #: Largest number of mappings that are all scored, that of four copies of a chain
_MARGIN = 1e-6  #: Gain in TM-score that a mapping needs against an earlier one
_SAMPLED = 32  #: Number of residues of a chain that place it during the search
_ANCHORS = 8  #: Number of predicted chains that are superposed alone
_REWEIGHTED = 2
_SCORED = 32  #: Number of mappings of a search that are scored


@dataclass(frozen=True)
class ChainCandidates:
    """Chains of a prediction and a reference that may correspond."""

    #: Corresponding residues ``[K, 2]`` int64 of each pair of chains, as places in the whole structures
    residues: Mapping[tuple[int, int], np.ndarray]
    identical: Mapping[tuple[int, int], int]  #: Number of residues with one type, of each pair of chains
    #: Sets of copies in the prediction, each with its set of copies in the reference
    copies: Sequence[tuple[Sequence[int], Sequence[int]]]

    @property
    def count(self) -> int:
        """Number of mappings of all copies."""
        return math.prod(math.perm(max(len(a), len(b)), min(len(a), len(b))) for a, b in self.copies)

    def mappings(self) -> Iterator[ChainMap]:
        """Yield every mapping of the copies; the first keeps the order of chains."""
        choices = []
        for ours, theirs in self.copies:
            if len(ours) <= len(theirs):
                choices.append(
                    [tuple(zip(ours, one, strict=True)) for one in permutations(theirs, len(ours))]
                )
            else:
                choices.append(
                    [tuple(zip(one, theirs, strict=True)) for one in permutations(ours, len(theirs))]
                )
        for parts in product(*choices):
            yield self.complete(pair for part in parts for pair in part)

    def in_order(self) -> ChainMap:
        """Return the mapping that keeps the order of chains among copies."""
        return self.complete(pair for ours, theirs in self.copies for pair in zip(ours, theirs, strict=False))

    def complete(self, pairs: Iterable[tuple[int, int]]) -> ChainMap:
        """Add chains that are left over on both sides, those with most identical residues first."""
        chosen = list(pairs)
        ours, theirs = {i for i, _ in chosen}, {j for _, j in chosen}
        for i, j in sorted(self.residues, key=lambda pair: (-self.identical[pair], pair)):
            if i not in ours and j not in theirs:
                chosen.append((i, j))
                ours.add(i)
                theirs.add(j)
        return tuple(sorted(chosen, key=lambda pair: pair[1]))

    def rows(self, mapping: ChainMap) -> np.ndarray:
        """Return corresponding residues ``[K, 2]`` int64 of the mapped chains."""
        return np.concatenate([np.zeros((0, 2), np.int64), *(self.residues[pair] for pair in mapping)])


def chain_candidates(
    ours: Sequence[str],
    theirs: Sequence[str],
    *,
    indices: Sequence[Sequence[np.ndarray]] | None = None,
    identity: float = _COPY,
) -> ChainCandidates:
    """Find chains that may correspond, from the sequences of a prediction's and a reference's chains.

    ``indices`` are the residue indices of both structures' chains; None if no chain has gaps. Where they show gaps,
    residues correspond by :func:`corresponding_residues`, otherwise by their alignment. Copies of a chain have the same
    type at a share ``identity`` of their common residues.
    """
    alignments = _Alignments(identity)
    if indices is None:
        indices = [[np.arange(len(one)) for one in sequences] for sequences in (ours, theirs)]
    our_chains, their_chains = map(_letters_of, (ours, theirs), indices)
    starts = [np.cumsum([0, *map(len, sequences)]) for sequences in (ours, theirs)]
    residues, identical = {}, {}
    for i, one in enumerate(our_chains):
        for j, other in enumerate(their_chains):
            if alignments.correspond(one, other):
                residues[i, j] = alignments.rows(one, other) + np.array([starts[0][i], starts[1][j]])
                identical[i, j] = alignments.identical(one, other)
    our_sets, their_sets = (_sets_of_copies(chains, alignments) for chains in (our_chains, their_chains))
    likeness = {}
    for number, one_set in enumerate(our_sets):
        for place, other_set in enumerate(their_sets):
            pairs = list(product(one_set, other_set))
            if all(pair in residues for pair in pairs):
                share = max(identical[pair] / len(residues[pair]) for pair in pairs)
                likeness[number, place] = share, max(identical[pair] for pair in pairs)
    copies: dict[int, int] = {}
    for number, place in sorted(likeness, key=lambda pair: likeness[pair], reverse=True):
        if number not in copies and place not in copies.values():
            copies[number] = place
    return ChainCandidates(
        residues, identical, [(our_sets[a], their_sets[b]) for a, b in sorted(copies.items())]
    )


class _Letters(NamedTuple):
    """Letters of a chain, and the index of each from 0."""

    sequence: str
    numbers: tuple[int, ...]


class _Alignments:
    """Alignments of pairs of chains, each made once."""

    def __init__(self, identity: float) -> None:
        self._rows: dict[tuple[_Letters, _Letters], np.ndarray] = {}
        self._identity = identity

    def rows(self, one: _Letters, other: _Letters) -> np.ndarray:
        if (one, other) not in self._rows:
            numbers = np.array(one.numbers), np.array(other.numbers)
            self._rows[one, other] = corresponding_residues(one.sequence, other.sequence, *numbers)
        return self._rows[one, other]

    def identical(self, one: _Letters, other: _Letters) -> int:
        return _count_identical(self.rows(one, other), one.sequence, other.sequence)

    def correspond(self, one: _Letters, other: _Letters) -> bool:
        shorter = min(len(one.sequence), len(other.sequence))
        return self.identical(one, other) >= max(1.0, _CORRESPONDING * shorter)

    def are_copies(self, one: _Letters, other: _Letters) -> bool:
        is_similar = self.identical(one, other) >= self._identity * len(self.rows(one, other))
        return is_similar and self.correspond(one, other)


def _letters_of(sequences: Sequence[str], indices: Sequence[np.ndarray]) -> list[_Letters]:
    pairs = zip(sequences, indices, strict=True)
    return [_Letters(sequence, tuple((index - index[0]).tolist())) for sequence, index in pairs]


def sets_of_copies(
    sequences: Sequence[str], indices: Sequence[np.ndarray], *, identity: float
) -> list[list[int]]:
    """Return the numbers of chains of a structure that are copies; arguments as of :func:`chain_candidates`."""
    return _sets_of_copies(_letters_of(sequences, indices), _Alignments(identity))


def _sets_of_copies(chains: Sequence[_Letters], alignments: _Alignments) -> list[list[int]]:
    """Return the numbers of chains that are copies of each other; each chain is compared with a set's first."""
    sets: list[list[int]] = []
    for number, chain in enumerate(chains):
        for own in sets:
            if alignments.are_copies(chains[own[0]], chain):
                own.append(number)
                break
        else:
            sets.append([number])
    return sets


def equal_chains(sequences: Sequence[str]) -> ChainCandidates:
    """Return the chains that are exchangeable between two structures of the same sequences: those of one sequence."""
    starts = np.cumsum([0, *map(len, sequences)])
    sets = [[i for i, one in enumerate(sequences) if one == own] for own in dict.fromkeys(sequences)]
    residues = {
        (i, j): np.arange(len(sequences[i]))[:, None] + starts[[i, j]]
        for own in sets
        for i in own
        for j in own
    }
    return ChainCandidates(
        residues, {pair: len(rows) for pair, rows in residues.items()}, [(own, own) for own in sets]
    )


def corresponding_residues(
    sequence_a: str, sequence_b: str, index_a: np.ndarray, index_b: np.ndarray
) -> np.ndarray:
    """Return corresponding residues of two chains, ``[K, 2]`` int64, both columns increasing.

    An alignment of sequences cannot place a gap within repeated letters, and pays for short gaps by mismatches. So the
    residue indices decide if one has gaps: residues of equal index correspond, after the shift of one index that makes
    most of them identical. The alignment of :func:`align_residues` decides if it makes more residues identical.

    Args:
        sequence_a: Letters of the first chain.
        sequence_b: Letters of the second chain.
        index_a: ``[N]`` int, increasing residue index of the first chain.
        index_b: ``[M]`` int, that of the second chain.
    """
    if np.array_equal(np.diff(index_a), np.diff(index_b)) and sequence_a == sequence_b:
        return np.stack([np.arange(len(sequence_a))] * 2, -1)
    aligned = align_residues(sequence_a, sequence_b)
    if not any((np.diff(index) != 1).any() for index in (index_a, index_b)):
        return aligned
    numbered = _equal_index(sequence_a, sequence_b, index_a, index_b)
    both = [_count_identical(rows, sequence_a, sequence_b) for rows in (numbered, aligned)]
    return numbered if both[0] >= both[1] else aligned


def _equal_index(sequence_a: str, sequence_b: str, index_a: np.ndarray, index_b: np.ndarray) -> np.ndarray:
    """Return the residues of equal index after the shift that makes most of them identical."""
    first, second = (rc.sequence_to_aatype(sequence) for sequence in (sequence_a, sequence_b))
    equal = (first[:, None] == second[None, :]) & (first[:, None] < rc.unk_restype_index)
    shifts, counts = np.unique((index_b[None, :] - index_a[:, None])[equal], return_counts=True)
    if not len(shifts):
        return np.zeros((0, 2), np.int64)
    shift = shifts[counts.argmax()]
    _, rows_a, rows_b = np.intersect1d(index_a + shift, index_b, assume_unique=True, return_indices=True)
    return np.stack([rows_a, rows_b], -1)


def _count_identical(rows: np.ndarray, sequence_a: str, sequence_b: str) -> int:
    return sum(sequence_a[i] == sequence_b[j] for i, j in rows.tolist())


def align_residues(sequence_a: str, sequence_b: str) -> np.ndarray:
    """Return corresponding residues of two sequences, ``[K, 2]`` int64, by their best alignment.

    BLOSUM62; gaps cost 11 to open and 1 to extend, and nothing at the ends, so that constructs with tags and structures
    with missing loops and termini are aligned. Both columns increase; the result is empty if the sequences share
    nothing.
    """
    if sequence_a == sequence_b:
        return np.stack([np.arange(len(sequence_a))] * 2, -1)
    known = (rc.aatype_to_sequence(rc.sequence_to_aatype(s)) for s in (sequence_a, sequence_b))
    first, second = known
    if not first or not second:
        return np.zeros((0, 2), np.int64)
    from Bio.Align import PairwiseAligner, substitution_matrices  # slow to import

    aligner = PairwiseAligner(mode="global", open_gap_score=-11.0, extend_gap_score=-1.0)
    aligner.end_gap_score = 0.0
    aligner.substitution_matrix = substitution_matrices.load("BLOSUM62")
    columns = [
        np.stack([np.arange(*a), np.arange(*b)], -1)
        for a, b in zip(*aligner.align(first, second)[0].aligned, strict=True)
    ]
    return np.concatenate([np.zeros((0, 2), np.int64), *columns])


def map_chains(
    candidates: ChainCandidates, predicted: Tensor, reference: Tensor, has: Tensor, resolved: Tensor
) -> ChainMap:
    """Return the mapping with the largest TM-score of the whole complex, the first one of equal ones.

    Up to 24 mappings are all scored. Of more, each pair of copies is superposed, the other chains are assigned by their
    distance, and superposition and assignment are repeated until they are stable. Scores are those of the quick search
    of :func:`fastfold.protein.metrics.tm_score.tm_score`.

    Args:
        candidates: Chains that may correspond.
        predicted: CA positions ``[N, 3]`` in Å.
        reference: ``[M, 3]`` in Å.
        has: ``[N]``, 1 where the prediction has the atom.
        resolved: ``[M]``, 1 where the reference has it.
    """
    if candidates.count == 1:
        return candidates.in_order()
    length = int((resolved > 0.5).sum())
    here, there = predicted.double(), reference.double()
    best, largest = candidates.in_order(), -math.inf
    few = candidates.count <= _MAX_TRIED
    trials = candidates.mappings() if few else _Search(candidates, here, there, has, resolved).mappings()
    for mapping in trials:
        ours, theirs = torch.from_numpy(candidates.rows(mapping)).unbind(-1)
        common = has[ours] * resolved[theirs]
        score = tm_score(here[ours], there[theirs], common, reference_length=length, quick=True)
        if score > largest + _MARGIN:
            best, largest = mapping, score
    return best


def order_copies(
    sequences: Sequence[str], predicted: Tensor, reference: Tensor, has: Tensor, resolved: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of chains ``[C]`` and of residues ``[N]`` in which copies fit a structure of these sequences.

    Other arguments are those of :func:`map_chains`.
    """
    copies = equal_chains(sequences)
    mapping = map_chains(copies, predicted, reference, has, resolved)
    ours, theirs = copies.rows(mapping).T
    return np.array([i for i, _ in mapping]), ours[theirs.argsort()]


class _Search:
    """Assignments of copies that are near each other under superpositions; arguments of :func:`map_chains`."""

    def __init__(
        self, candidates: ChainCandidates, predicted: Tensor, reference: Tensor, has: Tensor, resolved: Tensor
    ) -> None:
        self._candidates = candidates
        self._scale = tm_score_scale(int((resolved > 0.5).sum()))
        self._pairs = [(i, j) for ours, theirs in candidates.copies for i in ours for j in theirs]
        moving, fixed, owner = [], [], []
        for number, pair in enumerate(self._pairs):
            ours, theirs = torch.from_numpy(candidates.residues[pair]).unbind(-1)
            common = ((has[ours] * resolved[theirs]) > 0.5).nonzero().squeeze(-1)
            if len(common) > _SAMPLED:
                common = common[torch.linspace(0, len(common) - 1, _SAMPLED).round().long()]
            moving.append(predicted[ours[common]])
            fixed.append(reference[theirs[common]])
            owner.append(torch.full((len(common),), number))
        self._moving, self._fixed, self._owner = torch.cat(moving), torch.cat(fixed), torch.cat(owner)

    def mappings(self) -> list[ChainMap]:
        """Return different mappings, that in the order of the chains first, then those of the largest shares."""
        chains = sorted({i for i, _ in self._pairs})
        anchors = set(chains[:: -(-len(chains) // _ANCHORS)])
        shares: dict[ChainMap, float] = {}
        for number, (i, _) in enumerate(self._pairs):
            if i not in anchors:
                continue
            mapping, share = self._assign(self._owner == number)
            while mapping not in shares:
                shares[mapping] = share
                used = torch.tensor([pair in mapping for pair in self._pairs])
                mapping, share = self._assign(used[self._owner])
        best_first = sorted(shares, key=lambda one: -shares[one])
        return list(dict.fromkeys([self._candidates.in_order(), *best_first[:_SCORED]]))

    def _assign(self, chosen: Tensor) -> tuple[ChainMap, float]:
        """Superpose some residues and assign copies by their shares of the TM-score; return the sum as well."""
        moving, fixed = self._moving[chosen], self._fixed[chosen]
        motion = superpose(moving, fixed, torch.ones(len(moving), dtype=torch.float64))
        for _ in range(_REWEIGHTED):  # far residues count less and less
            motion = superpose(moving, fixed, self._near(motion.apply(moving), fixed))
        near = self._near(motion.apply(self._moving), self._fixed)
        shares = torch.zeros(len(self._pairs), dtype=torch.float64).index_add_(0, self._owner, near)
        ours, theirs, assigned = set(), set(), []
        for number in shares.argsort(descending=True, stable=True).tolist():
            i, j = self._pairs[number]
            if i not in ours and j not in theirs:
                assigned.append((i, j))
                ours.add(i)
                theirs.add(j)
        share = dict(zip(self._pairs, shares.tolist(), strict=True))
        assigned = _exchanged(assigned, share)
        return self._candidates.complete(assigned), sum(share[pair] for pair in assigned)

    def _near(self, moved: Tensor, fixed: Tensor) -> Tensor:
        """Return the terms ``[n]`` of the TM-score."""
        return 1.0 / (1.0 + (moved - fixed).square().sum(-1) / self._scale**2)


def _exchanged(
    assigned: list[tuple[int, int]], share: Mapping[tuple[int, int], float]
) -> list[tuple[int, int]]:
    """Exchange the chains of two pairs while the sum of their shares increases."""
    improves = True
    while improves:
        improves = False
        for a, b in combinations(range(len(assigned)), 2):
            (i, j), (k, m) = assigned[a], assigned[b]
            if (i, m) not in share or (k, j) not in share:
                continue
            if share[i, m] + share[k, j] > share[i, j] + share[k, m] + _MARGIN:
                assigned[a], assigned[b], improves = (i, m), (k, j), True
    return assigned
