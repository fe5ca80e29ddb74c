"""Matching of the experiment's chains to the predicted chains (multi-chain permutation alignment).

Copies of one sequence are interchangeable, and the network cannot know their order in the file. Each predicted chain
therefore gets the labels of the copy that fits best before losses are computed (Evans et al. 2021,
AlphaFold-Multimer, doi:10.1101/2021.10.04.463034, section 7.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.tm_score import superpose

ChainLabels = Mapping[str, Tensor]
"""Labels of one whole chain of the experiment. Every tensor has a leading residue axis ``[L]``; among them are
``residue_index`` (of the numbering that the prediction uses), ``asym_id``, ``entity_id``, ``all_atom_positions``
``[L, 37, 3]`` (Å) and ``all_atom_mask [L, 37]``. A list of chains holds every chain of the assembly, including those
outside of the prediction's crop."""

_CA = rc.atom_order["CA"]
_FEWEST = 3  #: Minimum number of common resolved residues for a superposition
_MARGIN = 1e-3
"""Improvement in Å that a permutation needs: under perfect symmetry all fit equally and the given one is kept."""


def split_chains(labels: Mapping[str, Tensor], asym_id: Tensor) -> list[dict[str, Tensor]]:
    """Split labels ``[N, ...]`` into chains, in the order of ``asym_id [N]``; padding (0) is left out."""
    chains = [int(i) for i in asym_id.unique() if i > 0]
    return [{key: value[asym_id == chain] for key, value in labels.items()} for chain in chains]


def permute_labels(
    predicted: Tensor,
    asym_id: Tensor,
    entity_id: Tensor,
    residue_index: Tensor,
    chains: Sequence[ChainLabels],
) -> dict[str, Tensor]:
    """Return the labels of every predicted residue, from the chains that :func:`match_chains` chooses.

    Args:
        predicted: CA positions ``[N, 3]`` in Å, of any precision.
        asym_id: ``[N]`` chain of each residue, 0 for padding.
        entity_id: ``[N]``, equal for chains of one sequence.
        residue_index: ``[N]``.
        chains: Labels of the whole chains.

    Returns:
        A tensor ``[N, ...]`` for each label that all chains have, except the four that name residues and chains.
        Zeros for padding, for residues that the chosen chain lacks, and for chains without a matching sequence.
    """
    chosen = match_chains(predicted, asym_id, entity_id, residue_index, chains)
    identity = {"residue_index", "asym_id", "entity_id", "sym_id"}
    names = set.intersection(*(set(chain) for chain in chains)) - identity
    result = {
        name: chains[0][name].new_zeros(len(asym_id), *chains[0][name].shape[1:]) for name in sorted(names)
    }
    for asym, index in chosen.items():
        here = (asym_id == asym).nonzero().squeeze(-1)
        there, is_known = _rows(residue_index[here], chains[index]["residue_index"])
        for name, value in result.items():
            value[here[is_known]] = chains[index][name][there[is_known]].to(value.dtype)
    return result


def match_chains(
    predicted: Tensor,
    asym_id: Tensor,
    entity_id: Tensor,
    residue_index: Tensor,
    chains: Sequence[ChainLabels],
) -> dict[int, int]:
    """Match the chains of the experiment to the chains of the prediction; arguments as of :func:`permute_labels`.

    The anchor is the sequence with the fewest copies, and of these the one with most resolved residues. Each of its
    predicted copies is superposed on each of its experimental copies. Each time all other chains are assigned
    greedily: the pair of the same sequence with the smallest deviation first. The assignment with the smallest root
    mean square deviation of the resolved CA atoms, superposed together, wins. Every chain of the experiment is used at
    most once.

    A prediction that is not finite keeps the chains as given: nothing fits it, and its loss is not finite either.

    Returns:
        For each ``asym_id`` the index in ``chains``. Predicted chains without an unused chain of their sequence are
        left out.
    """
    with torch.no_grad():
        pairs = _Pairs(predicted, asym_id, entity_id, residue_index, chains)
        best = pairs.as_given()
        if bool(pairs.predicted.isfinite().all()):
            smallest = pairs.deviation(best)
            for anchor in pairs.anchors():
                assigned = pairs.assign(anchor)
                deviation = pairs.deviation(assigned)
                if deviation < smallest - _MARGIN:
                    best, smallest = assigned, deviation
        return {pairs.asym[k]: pairs.chain[k] for k in best}


class _Pairs:
    """All ``K`` pairs of a predicted and an experimental chain of one sequence; arguments of :func:`match_chains`.

    Positions are ``[K, L, 3]`` of CA in Å, padded to the longest chain, and ``mask [K, L]`` is 1 for residues that the
    experiment resolved. ``is_same`` tells for each pair if both chains have one ``asym_id``.
    """

    def __init__(
        self,
        predicted: Tensor,
        asym_id: Tensor,
        entity_id: Tensor,
        residue_index: Tensor,
        chains: Sequence[ChainLabels],
    ) -> None:
        members = {int(a): (asym_id == a).nonzero().squeeze(-1) for a in asym_id.unique() if a > 0}
        keys = [
            (asym, index, int(entity_id[rows[0]]))
            for asym, rows in members.items()
            for index, chain in enumerate(chains)
            if int(chain["entity_id"][0]) == int(entity_id[rows[0]])
        ]
        self.asym, self.chain, self.entity = ([key[axis] for key in keys] for axis in range(3))
        self.is_same = [int(chains[index]["asym_id"][0]) == asym for asym, index, _ in keys]
        longest = max((len(rows) for rows in members.values()), default=0)
        self.predicted = predicted.new_zeros((len(keys), longest, 3), dtype=torch.float64)
        self.true, self.mask = torch.zeros_like(self.predicted), self.predicted.new_zeros(len(keys), longest)
        for k, (asym, index, _) in enumerate(keys):
            rows, chain = members[asym], chains[index]
            there, is_known = _rows(residue_index[rows], chain["residue_index"])
            self.predicted[k, : len(rows)] = predicted[rows].double()
            self.true[k, : len(rows)] = chain["all_atom_positions"][there, _CA].double()
            self.mask[k, : len(rows)] = is_known * (chain["all_atom_mask"][there, _CA] > 0.5)
        self.true.masked_fill_(self.mask[..., None] < 0.5, 0.0)

    def as_given(self) -> list[int]:
        """Return pairs of the same ``asym_id``; chains without one get the first unused chain of their sequence."""
        return self._greedy([0.0 if is_same else 1.0 for is_same in self.is_same])

    def anchors(self) -> list[int]:
        """Return the pairs of the anchor's sequence that can be superposed."""
        resolved = self.mask.sum(-1).tolist()
        usable = [k for k in range(len(self.asym)) if resolved[k] >= _FEWEST]
        copies = {e: len({self.asym[k] for k in usable if self.entity[k] == e}) for e in self.entity}
        sizes = {e: max((resolved[k] for k in usable if self.entity[k] == e), default=0) for e in copies}
        anchor = min({self.entity[k] for k in usable}, key=lambda e: (copies[e], -sizes[e]), default=None)
        return [k for k in usable if self.entity[k] == anchor]

    def assign(self, anchor: int) -> list[int]:
        """Return a greedy assignment of experimental to predicted chains, superposed by the anchor pair.

        Each chain is used at most once. Pairs without a common resolved residue come last.
        """
        squared, count = self._squared([anchor]), self.mask.sum(-1)
        deviation = torch.where(count > 0, squared / count.clamp(min=1.0), torch.inf)
        deviation[anchor] = -1.0
        return self._greedy(deviation.tolist())

    def deviation(self, pairs: list[int]) -> float:
        """Return the root mean square deviation in Å of all resolved residues in these pairs, superposed together."""
        squared = self._squared(pairs)[pairs].sum()
        return float((squared / self.mask[pairs].sum().clamp(min=1.0)).sqrt())

    def _squared(self, superposed: list[int]) -> Tensor:
        """Return sums of squared deviations ``[K]`` in Å² of all pairs after superposing some of them."""
        true, predicted, mask = (x[superposed].flatten(0, 1) for x in (self.true, self.predicted, self.mask))
        motion = superpose(true, predicted, mask)
        moved = self.true @ motion.rotation.mT + motion.translation
        return ((moved - self.predicted).square().sum(-1) * self.mask).sum(-1)

    def _greedy(self, cost: list[float]) -> list[int]:
        chosen: list[int] = []
        asym, chain = set[int](), set[int]()
        # Ties keep the given partner, then the order of the chains.
        for k in sorted(range(len(cost)), key=lambda k: (cost[k], not self.is_same[k], k)):
            if self.asym[k] not in asym and self.chain[k] not in chain:
                chosen.append(k)
                asym.add(self.asym[k])
                chain.add(self.chain[k])
        return chosen


def _rows(wanted: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Find ``wanted [M]`` numbers in ``present [L]``: rows (0 if missing) and a mask of found ones."""
    equal = wanted[:, None] == present[None, :]
    return equal.int().argmax(-1), equal.any(-1)
