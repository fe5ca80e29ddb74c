"""Losses of designs under ColabDesign's names, each a small function of a network's outputs.

Masks are float tensors of 0 and 1. Distances are in Å, pLDDT and pTM-like scores from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastfold.evoformer.confidence.scores import bin_centers, tm_score_of_bins
from fastfold.evoformer.losses.clashes import between_residue_clashes
from fastfold.evoformer.losses.masked import PairLogits, masked_mean, over_bins, pair_logits
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import lookup
from fastfold.protein.metrics.tm_score import superpose
from fastfold.protein.rigid import Rigid

_N, _CA, _C = (rc.atom_order[name] for name in ("N", "CA", "C"))
_LAST_CENTER = 31.0  #: Divisor of aligned errors in Å, as in ColabDesign


@dataclass(frozen=True)
class Outputs:
    """Outputs of a network that losses read, of ``N`` residues."""

    #: Logits ``[N, N, bins]``; losses read them by :func:`~.pair_logits.over_bins`
    distogram: Tensor | PairLogits
    lower_edges: Tensor  #: Lower edge of each distance bin in Å, ``[bins]``; 0 for the first
    lddt: Tensor  #: Logits of the predicted lDDT ``[N, bins]``
    resolved: Tensor  #: Logits of resolved atoms ``[N, 37]``
    positions: Tensor  #: ``[N, 37, 3]`` in Å
    atom14: Tensor  #: ``[N, 14, 3]`` in Å
    #: Logits of the aligned error ``[N, N, bins]``, or None without that head
    errors: Tensor | PairLogits | None = None
    error_breaks: Tensor | None = None  #: Edges of its bins in Å, ``[bins - 1]``, or None

    @classmethod
    def from_result(cls, result: dict[str, Any], order: Tensor | None = None) -> Outputs:
        """Read the result of :meth:`fastfold.evoformer.model.AlphaFold.forward`.

        ``order [N]`` has indices of the result's residues in the wanted order; None for the order of the result.
        """

        def single(x: Tensor) -> Tensor:
            return x if order is None else x[order]

        edges = result["distogram"]["bin_edges"]
        errors = result.get("predicted_aligned_error")
        structure = result["structure_module"]
        return cls(
            distogram=pair_logits(result["distogram"], order),
            lower_edges=torch.cat([edges.new_zeros(1), edges]),
            lddt=single(result["predicted_lddt"]["logits"]),
            resolved=single(result["experimentally_resolved"]["logits"]),
            positions=single(structure["final_atom_positions"]),
            atom14=single(structure["final_atom14_positions"]),
            errors=None if errors is None else pair_logits(errors, order),
            error_breaks=None if errors is None else errors["breaks"],
        )


@dataclass(frozen=True)
class ContactOptions:
    """Contacts that a loss counts."""

    num: int = 2  #: Contacts per residue
    cutoff: float = 14.0  #: Distance in Å below which two CB atoms are in contact
    #: True for the probability of a contact, False for the entropy within the cutoff as well
    binary: bool = False
    seqsep: int = 0  #: Smallest separation in the sequence
    num_pos: float = float("inf")  #: Residues that count, those with the lowest loss; infinite for all


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(mask, x, x.dim(), eps=1e-8)


def plddt_loss(outputs: Outputs, mask: Tensor) -> Tensor:
    """Return one minus the mean predicted lDDT of the residues in ``mask [N]``."""
    bins = outputs.lddt.shape[-1]
    centers = (torch.arange(bins, device=mask.device, dtype=outputs.lddt.dtype) + 0.5) / bins
    return _mean(1.0 - outputs.lddt.softmax(-1) @ centers, mask)


def exp_res_loss(outputs: Outputs, mask: Tensor) -> Tensor:
    """Return one minus the mean probability that an experiment resolves CA, over ``mask [N]``."""
    return _mean(1.0 - outputs.resolved[:, _CA].sigmoid(), mask)


def pae_loss(outputs: Outputs, pairs: Tensor) -> Tensor:
    """Return the mean aligned error over ``pairs [N, N]``, both ways, divided by 31 Å."""
    assert outputs.errors is not None
    assert outputs.error_breaks is not None
    breaks = outputs.error_breaks

    def expected(logits: Tensor) -> Tensor:
        return logits.softmax(-1) @ bin_centers(breaks.to(logits.dtype)) / _LAST_CENTER

    error = over_bins(expected, outputs.errors)
    return _mean((error + error.transpose(0, 1)) / 2, pairs)


def interface_ptm_loss(outputs: Outputs, chain: Tensor) -> Tensor:
    """Return one minus the interface pTM of chains with numbers ``[N]``, as in BindCraft."""
    assert outputs.errors is not None
    assert outputs.error_breaks is not None
    breaks = outputs.error_breaks

    def expected(logits: Tensor) -> Tensor:
        return logits.softmax(-1) @ tm_score_of_bins(bin_centers(breaks.to(logits.dtype)), float(len(chain)))

    between = (chain[:, None] != chain[None]).to(outputs.positions.dtype)
    scores = over_bins(expected, outputs.errors) * between
    return 1.0 - (scores.sum(-1) / (between.sum(-1) + 1e-8)).max()


def contact_losses(outputs: Outputs, cutoff: float, binary: bool) -> Tensor:
    """Return the loss ``[N, N]`` of each pair for being in contact below ``cutoff`` in Å.

    ``-log P(d < cutoff)`` if binary; otherwise the cross entropy of the whole distogram against its part below the
    cutoff, which also rewards certainty within.
    """

    def of_pairs(logits: Tensor) -> Tensor:
        near = (outputs.lower_edges < cutoff).to(logits.dtype)
        if binary:
            return -torch.log((near * logits.softmax(-1) + 1e-8).sum(-1))
        within = (logits - 1e7 * (1.0 - near)).softmax(-1)
        return -(within * logits.log_softmax(-1)).sum(-1)

    return over_bins(of_pairs, outputs.distogram)


def contact_loss(
    outputs: Outputs, offset: Tensor, options: ContactOptions, rows: Tensor, pairs: Tensor
) -> Tensor:
    """Return the mean loss of the best contacts of the residues in ``rows [N]``.

    ``offset [N, N]`` is the separation in the sequence, and ``pairs [N, N]`` those that may be in contact.
    """
    losses = contact_losses(outputs, options.cutoff, options.binary)
    per_residue = _mean_of_lowest(losses, options.num, separated_pairs(offset, options.seqsep, pairs))
    return _mean_of_lowest(per_residue, options.num_pos, rows > 0)


def separated_pairs(offset: Tensor, seqsep: int, pairs: Tensor) -> Tensor:
    """Return the pairs ``[N, N]`` bool with a separation ``offset [N, N]`` of at least ``seqsep``."""
    return (pairs > 0) & (offset.abs() >= seqsep)


def helical_pairs(offset: Tensor, pairs: Tensor) -> Tensor:
    """Return the pairs ``[N, N]`` bool that are three residues apart."""
    return (offset == 3) & (pairs > 0)


def avoid_loss(outputs: Outputs, cutoff: float, rows: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean over residues of -log of the probability that their likeliest contact is absent.

    Unlike a negative contact loss it has a lower bound: it vanishes when no contact is likely. CB atoms below
    ``cutoff`` in Å are in contact; ``rows [N]`` are the residues that shall not touch, ``pairs [N, N]`` those that
    count.
    """

    def within(logits: Tensor) -> Tensor:
        return (logits.softmax(-1) * (outputs.lower_edges < cutoff).to(logits.dtype)).sum(-1)

    contact = (over_bins(within, outputs.distogram) * pairs).amax(-1)
    return _mean(-torch.log(1.0 - contact + 1e-6), rows)


def _mean_of_lowest(x: Tensor, count: float, mask: Tensor) -> Tensor:
    """Return the mean of the lowest ``count`` masked entries of the last axis, 0 if there are none."""
    ordered = torch.where(mask, x, torch.inf).sort(-1).values
    kept = (torch.arange(x.shape[-1], device=x.device) < count) & ordered.isfinite()
    return torch.where(kept, ordered, 0.0).sum(-1) / (kept.sum(-1) + 1e-8)


def helix_loss(outputs: Outputs, offset: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean loss for residues three apart to be within 6 Å, over ``pairs [N, N]``."""
    losses = contact_losses(outputs, 6.0, True)
    return _mean(losses, helical_pairs(offset, pairs).to(losses.dtype))


def dgram_cce_loss(outputs: Outputs, beta: Tensor, pairs: Tensor) -> Tensor:
    """Return the cross entropy of the distogram against given CB atoms ``[N, 3]`` in Å, over ``pairs [N, N]``."""
    squared = (beta[:, None] - beta[None]).square().sum(-1)
    # As many edges as lie strictly below the distance.
    bins = torch.bucketize(squared, outputs.lower_edges[1:].to(squared.dtype).square())

    def of_pairs(logits: Tensor, own: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="none").view_as(own)

    return _mean(over_bins(of_pairs, outputs.distogram, bins), pairs)


def rmsd_loss(outputs: Outputs, ca: Tensor, mask: Tensor, fitted: Tensor | None = None) -> Tensor:
    """Return the root mean square deviation in Å of CA from given ones ``[N, 3]`` over ``mask [N]``.

    Structures are superposed on the residues ``fitted [N]``, by default those of ``mask``.
    """
    predicted = outputs.positions[:, _CA]
    weights = (mask / (mask.sum() + 1e-8))[:, None]
    # The best superposition of the same residues has no gradient of its own.
    moving, weighted = (predicted.detach(), mask) if fitted is None else (predicted, fitted)
    moved = superpose(moving, ca, weighted).apply(predicted)
    return ((weights * (moved - ca).square()).sum() + 1e-8).sqrt()


def fape_loss(outputs: Outputs, positions: Tensor, pairs: Tensor, clamp: float = 10.0) -> Tensor:
    """Return the frame-aligned error of CA against ``positions [N, 37, 3]``, up to ``clamp``, both in Å.

    It is in units of 10 Å, over ``pairs [N, N]`` of frame and atom.
    """
    error = (_seen_from_frames(positions) - _seen_from_frames(outputs.positions)).square().sum(-1)
    error = (error + 1e-8).sqrt().clamp(0.0, clamp) / 10.0
    return _mean(error, pairs)


def _seen_from_frames(positions: Tensor) -> Tensor:
    """Return CA of each residue in the backbone frame of each other one, ``[N, N, 3]``."""
    n, ca, c = positions[:, _N], positions[:, _CA], positions[:, _C]
    return Rigid.from_three_points(c, ca, n)[:, None].invert_apply(ca[None])


def rg_loss(outputs: Outputs, mask: Tensor) -> Tensor:
    """Return the radius of gyration of CA in Å minus 2.38 N^0.365, softened below zero (ELU), over ``mask [N]``."""
    ca = outputs.positions[mask > 0, _CA]
    radius = ((ca - ca.mean(0)).square().sum(-1).mean() + 1e-8).sqrt()
    return F.elu(radius - 2.38 * len(ca) ** 0.365)


def termini_loss(outputs: Outputs, mask: Tensor, threshold: float = 7.0) -> Tensor:
    """Return the distance of the first and last CA in ``mask [N]`` beyond a threshold, in Å."""
    ca = outputs.positions[mask > 0, _CA]
    return F.relu(((ca[0] - ca[-1]).square().sum() + 1e-8).sqrt() - threshold)


def clash_loss(
    outputs: Outputs, aatype: Tensor, residue_index: Tensor, chain: Tensor, mask: Tensor
) -> Tensor:
    """Return the overlap of atoms of different residues beyond 1.5 Å, in Å per residue of ``mask [N]``."""
    exists = lookup("restype_atom14_mask", aatype, outputs.atom14)
    clashes = between_residue_clashes(outputs.atom14, exists, residue_index, chain, aatype, 1.5)
    return _mean(clashes["clashes_per_atom_loss_sum"].sum(-1), mask)


def seq_ent_loss(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return the mean entropy of the sequence's distributions in nats, from ``logits [N, 20]``, over ``mask [N]``."""
    scaled = logits / temperature
    return _mean(-(scaled.softmax(-1) * scaled.log_softmax(-1)).sum(-1), mask)
