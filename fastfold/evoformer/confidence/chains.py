"""pTM, ipTM and actifpTM of chains and pairs of chains, from the logits of residue pairs.

pTM of one chain and ipTM of two are :func:`fastfold.evoformer.confidence.scores.predicted_tm_score` of a part of the
residues. actifpTM (Varga et al. 2025, doi:10.1093/bioinformatics/btaf107) is ipTM with residue pairs weighted by
the probability that they touch. Disordered parts of the chains then do not dilute a confident interface. The details
follow ColabFold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.evoformer.confidence.scores import bin_centres, row_blocks, tm_score_of_bins
from fastfold.evoformer.execution import LazyRows, rows_of

CONTACT_DISTANCE = 8.0  #: Residues touch if their CB atoms are nearer than this, in Å

_EPSILON = 1e-8


def chain_confidence(
    logits: Tensor | LazyRows,
    breaks: Tensor,
    asym_id: Tensor,
    *,
    distogram: Tensor | LazyRows | None = None,
    bin_edges: Tensor | None = None,
    contact_threshold: float | None = None,
) -> dict[str, Tensor]:
    """Compute pTM of each chain and ipTM of each pair of chains, in blocks of rows.

    As in ColabFold, d0 of a pair comes from the length of the whole complex, and d0 of a chain from the chain's
    length. Lengths below 19 count as 19, so the pTM of a very short chain is near 0 for any structure.

    Args:
        logits: Aligned error logits ``[N, N, bins]``.
        breaks: ``[bins - 1]`` bin edges in Å.
        asym_id: ``[N]`` chain of each residue; residues of one chain are contiguous.
        distogram: Distogram logits ``[N, N, bins]``, symmetric; None to leave out actifpTM.
        bin_edges: ``[bins - 1]`` of the distogram in Å.
        contact_threshold: Weight 1 for residues that touch the other chain with at least this probability, 0 for
            the others (ColabFold's option, with 0.6). None to weight pairs by their contact probability.

    Returns:
        ``chain_ptm [C]``, ``chain_pair_iptm [C, C]`` and, with a distogram, ``chain_pair_actifptm [C, C]`` and the
        scalar ``actifptm`` of all interfaces. Chains are in the order of ``asym_id``'s values, matrices are symmetric
        with a diagonal of 0.
    """
    chains, chain_of = torch.unique(asym_id, return_inverse=True)
    member = torch.nn.functional.one_hot(chain_of, len(chains)).float()
    sizes = member.sum(0)
    centres = bin_centres(breaks.float())
    of_complex = tm_score_of_bins(centres, len(asym_id))
    of_chain = [tm_score_of_bins(centres, float(size)) for size in sizes]
    touching = None
    if contact_threshold is not None and distogram is not None and bin_edges is not None:
        touching = _touching(distogram, bin_edges, member, contact_threshold)

    own = torch.zeros(len(asym_id), device=breaks.device)
    to_chain = member.new_zeros(3, *member.shape)  # ipTM of a residue with a chain; actifpTM's sum and weight
    for rows, part in row_blocks(logits):
        weights = None
        if touching is not None:
            weights = touching[rows] @ member.mT * touching[:, chain_of[rows]].mT
        elif distogram is not None and bin_edges is not None:
            weights = contact_probability(rows_of(distogram, rows), bin_edges)
        probabilities = torch.softmax(part.float(), -1)
        expected = probabilities @ of_complex
        to_chain[0, rows] = expected @ member / (_EPSILON + sizes)
        if weights is not None:
            to_chain[1, rows] = (expected * weights) @ member
            to_chain[2, rows] = weights @ member
        for chain, tm_of_bin in enumerate(of_chain):
            here, there = chain_of[rows] == chain, chain_of == chain
            if here.any():
                columns = _span(there)
                found = probabilities[_span(here), columns] @ tm_of_bin
                own[rows][here] = found.sum(-1) / (_EPSILON + sizes[chain])

    outside = 1.0 - member
    scores = {
        "chain_ptm": torch.stack([own[chain_of == chain].max() for chain in range(len(chains))]),
        "chain_pair_iptm": _pairs(to_chain[0], member),
    }
    if distogram is not None:
        summed, weight = to_chain[1] * outside, to_chain[2] * outside
        scores["chain_pair_actifptm"] = _pairs(summed / (_EPSILON + weight), member)
        scores["actifptm"] = (summed.sum(-1) / (_EPSILON + weight.sum(-1))).max()
    return scores


def contact_probability(logits: Tensor, bin_edges: Tensor) -> Tensor:
    """Return the probability ``[*, N, N]`` that two residues touch, from ``logits [*, N, N, bins]``.

    As in ColabFold, all of a bin counts if its lower edge is under :data:`CONTACT_DISTANCE`. The ``bin_edges [bins -
    1]`` are in Å.
    """
    near = torch.cat([bin_edges.new_zeros(1), bin_edges]) < CONTACT_DISTANCE
    return torch.softmax(logits.float(), -1)[..., : int(near.sum())].sum(-1)


def _touching(distogram: Tensor | LazyRows, bin_edges: Tensor, member: Tensor, threshold: float) -> Tensor:
    """Return ``[N, C]``, 1 where a residue touches another chain with at least this probability."""
    found = [
        (contact_probability(part, bin_edges) >= threshold).float() @ member
        for _, part in row_blocks(distogram)
    ]
    return (torch.cat(found) > 0).float() * (1.0 - member)


def _span(chosen: Tensor) -> slice:
    """Return the slice from the first to the last True of a mask ``[n]``."""
    places = chosen.nonzero()
    return slice(int(places[0]), int(places[-1]) + 1)


def _pairs(scores: Tensor, member: Tensor) -> Tensor:
    """Return the best residue score ``[C, C]`` of each pair of chains.

    ``scores [N, C]`` are those of residues with chains, ``member [N, C]`` the chains of residues, one-hot.
    """
    best = torch.stack([scores[mask].amax(0) for mask in member.mT.bool()])
    best = torch.maximum(best, best.mT)
    return best.fill_diagonal_(0.0)
