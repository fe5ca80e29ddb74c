"""pLDDT, aligned error and pTM from the logits of the heads (supplement, sections 1.9.6 and 1.9.7)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastfold.evoformer.execution import LazyRows, rows_of


def plddt(logits: Tensor) -> Tensor:
    """Return the expected lDDT-CA per residue ``[*, N]``, 0 to 100, from logits ``[*, N, bins]``.

    Example:
        >>> import torch
        >>> from fastfold.evoformer.confidence import plddt
        >>> plddt(torch.zeros(3, 50))
        tensor([50., 50., 50.])
    """
    bins = logits.shape[-1]
    centers = (torch.arange(bins, device=logits.device, dtype=torch.float32) + 0.5) / bins
    return 100.0 * (torch.softmax(logits.float(), -1) * centers).sum(-1)


def bin_centers(breaks: Tensor) -> Tensor:
    """Return the centres ``[bins]`` of error bins with edges ``breaks [bins - 1]``, both in Å.

    The last bin is as wide as the others.
    """
    step = breaks[1] - breaks[0]
    centers = breaks + step / 2
    return torch.cat([centers, centers[-1:] + step])


def predicted_aligned_error(logits: Tensor | LazyRows, breaks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expected aligned error ``[*, N, N]`` and its largest possible value, in Å.

    The bins of ``logits [*, N, N, bins]`` have the edges ``breaks [bins - 1]`` in Å.

    Example:
        >>> import torch
        >>> from fastfold.evoformer.confidence import predicted_aligned_error
        >>> errors, largest = predicted_aligned_error(torch.zeros(4, 4, 64), torch.linspace(0, 31, 63))
        >>> errors.shape, round(largest.item(), 2)
        (torch.Size([4, 4]), 31.75)
    """
    centers = bin_centers(breaks.float())
    error = torch.empty(logits.shape[:-1], dtype=centers.dtype, device=centers.device)
    for rows, part in row_blocks(logits):
        error[..., rows, :] = torch.softmax(part.float(), -1) @ centers
    return error, centers[-1]


def predicted_tm_score(
    logits: Tensor | LazyRows,
    breaks: Tensor,
    *,
    residue_weights: Tensor | None = None,
    asym_id: Tensor | None = None,
) -> Tensor:
    """Return the predicted TM-score (pTM), or the interface pTM (ipTM) if ``asym_id`` is given.

    Args:
        logits: Aligned error logits ``[N, N, bins]``.
        breaks: ``[bins - 1]`` bin edges in Å.
        residue_weights: ``[N]`` weight of each residue; ones by default.
        asym_id: ``[N]`` chain of each residue; only pairs in different chains count (ipTM). None for pTM.

    Returns:
        Scalar in [0, 1]: the best score over all residues that the others are aligned on.

    Example:
        >>> import torch
        >>> from fastfold.evoformer.confidence import predicted_tm_score
        >>> sure = torch.zeros(50, 50, 64)
        >>> sure[..., 0] = 100.0
        >>> score = predicted_tm_score(sure, torch.linspace(0, 31, 63))
        >>> round(score.item(), 2)
        0.99
    """
    if residue_weights is None:
        residue_weights = torch.ones(logits.shape[-2], device=breaks.device)
    centers = bin_centers(breaks.float())
    tm_of_bin = tm_score_of_bins(centers, float(residue_weights.sum()))
    per_alignment = torch.empty_like(residue_weights, dtype=tm_of_bin.dtype)
    for rows, part in row_blocks(logits):
        expected = torch.softmax(part.float(), -1) @ tm_of_bin
        weights = residue_weights[None, :] * residue_weights[rows, None]
        if asym_id is not None:
            weights = weights * (asym_id[rows, None] != asym_id[None, :])
        normed = weights / (1e-8 + weights.sum(-1, keepdim=True))
        per_alignment[rows] = (expected * normed).sum(-1)
    best = int((per_alignment * residue_weights).argmax())
    return per_alignment[best]


def tm_score_of_bins(centers: Tensor, residues: float) -> Tensor:
    """Return the TM-score term ``[bins]`` of an aligned error in each bin with ``centers [bins]`` in Å.

    ``residues`` is the length from which d0 of the TM-score is computed; lengths below 19 count as 19.
    """
    d0 = 1.24 * (max(residues, 19.0) - 15.0) ** (1.0 / 3.0) - 1.8
    return 1.0 / (1.0 + (centers / d0).square())


def row_blocks(logits: Tensor | LazyRows) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows ``[*, rows, N, bins]`` with their indices."""
    if isinstance(logits, LazyRows):
        yield from logits.blocks()
    else:
        for start in range(0, logits.shape[-3], 256):
            rows = slice(start, min(logits.shape[-3], start + 256))
            yield rows, logits[..., rows, :, :]


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

    actifpTM (Varga et al. 2025, doi:10.1093/bioinformatics/btaf107) is ipTM with residue pairs weighted by the
    probability that they touch. Disordered parts of the chains then do not dilute a confident interface.

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

    Example:
        >>> import torch
        >>> from fastfold.evoformer.confidence import chain_confidence
        >>> logits, breaks = torch.zeros(50, 50, 64), torch.linspace(0, 31, 63)
        >>> scores = chain_confidence(logits, breaks, torch.tensor([1] * 20 + [2] * 30))
        >>> scores["chain_ptm"].shape, scores["chain_pair_iptm"].shape
        (torch.Size([2]), torch.Size([2, 2]))
    """
    chains, chain_of = torch.unique(asym_id, return_inverse=True)
    member = torch.nn.functional.one_hot(chain_of, len(chains)).float()
    sizes = member.sum(0)
    centers = bin_centers(breaks.float())
    of_complex = tm_score_of_bins(centers, len(asym_id))
    of_chain = [tm_score_of_bins(centers, float(size)) for size in sizes]
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
                expected_tm = probabilities[_span(here), columns] @ tm_of_bin
                own[rows][here] = expected_tm.sum(-1) / (_EPSILON + sizes[chain])

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
    counts = [
        (contact_probability(part, bin_edges) >= threshold).float() @ member
        for _, part in row_blocks(distogram)
    ]
    return (torch.cat(counts) > 0).float() * (1.0 - member)


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
