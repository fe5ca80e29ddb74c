"""Differentiable input features of a designed sequence, from its logits.

As in ColabDesign, a sequence is relaxed between its logits, their softmax, and its most likely residues, and becomes
the only row of the alignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc

RESIDUES = 20
"""Residue types of a designed sequence, in the order of ``fastfold.protein.residue_constants.restypes``."""

_MSA_CHANNELS, _PROFILE = 49, 25
_GAPS = (21, _PROFILE + 21)  #: Channels of a gap in a row and in its profile


@dataclass(frozen=True)
class Relaxation:
    """Mixture of logits, softmax and most likely residues that the network sees."""

    soft: float = 0.0  #: Share of the softmax, 0 to 1; the rest are the parameters as they are
    hard: float = 0.0  #: Share of the most likely residues, 0 to 1
    temperature: float = 1.0  #: Divides the logits in the softmax
    alpha: float = 2.0  #: Multiplies the parameters to give logits

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            InputError: A value is outside its range.
        """
        for name in ("soft", "hard"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name}: expected a number from 0 to 1, found {getattr(self, name)}")
        for name in ("temperature", "alpha"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}: expected a positive number, found {getattr(self, name)}")


class RelaxedSequence(NamedTuple):
    """Forms of a sequence, each ``[N, 20]``."""

    logits: Tensor  #: Scaled parameters plus bias
    soft: Tensor  #: Softmax of the logits at the temperature
    hard: Tensor  #: One-hot most likely residues; the gradient is that of ``soft``
    pseudo: Tensor  #: Mixture that the network sees


def relax_sequence(parameters: Tensor, relaxation: Relaxation, bias: Tensor | None = None) -> RelaxedSequence:
    """Relax a sequence between its parameters and its most likely residues.

    Args:
        parameters: ``[N, 20]``, free numbers.
        relaxation: The mixture.
        bias: Added to the logits, ``[N, 20]`` or ``[20]``: a large negative number forbids a residue.

    Returns:
        The forms, differentiable with respect to ``parameters``; ``hard`` by the straight-through estimator
        (Bengio et al., 2013).

    Raises:
        InputError: The parameters have another shape.
    """
    if parameters.dim() != 2 or parameters.shape[-1] != RESIDUES:
        raise InputError(f"expected parameters [N, {RESIDUES}], found {list(parameters.shape)}")
    logits = parameters * relaxation.alpha
    if bias is not None:
        logits = logits + bias
    soft = torch.softmax(logits / relaxation.temperature, -1)
    chosen = F.one_hot(soft.argmax(-1), RESIDUES).to(soft.dtype)
    hard = (chosen - soft).detach() + soft
    pseudo = relaxation.soft * soft + (1.0 - relaxation.soft) * parameters
    pseudo = relaxation.hard * hard + (1.0 - relaxation.hard) * pseudo
    return RelaxedSequence(logits, soft, hard, pseudo)


def sequence_features(
    sequence: Tensor, *, multimer: bool, profile: Tensor | None = None, blocks: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the network's features of a sequence without an alignment, differentiable.

    The sequence is the first row of the MSA and its own cluster profile, without deletions and masked positions. Each
    block adds a row with gaps outside of it, as ColabDesign shows equal chains to a monomer network.

    Args:
        sequence: ``[N, 20]``, one-hot or any mixture of residues.
        multimer: True for a multimer network, whose ``target_feat`` has no flag of chain breaks.
        profile: Cluster profile ``[N, 20]``; by default ``sequence``.
        blocks: ``[K, N]``, True for the residues of each block; None for no further row.

    Returns:
        ``target_feat [N, 22 or 21]``, ``msa_feat [1 + K, N, 49]``, ``msa_mask [1 + K, N]`` and ``aatype [N]`` (int64,
        the largest entry of each residue).
    """
    target = F.pad(sequence, (0, 1) if multimer else (1, 1))
    gap = sequence.new_zeros(len(sequence), _PROFILE - RESIDUES)
    rest = sequence.new_zeros(len(sequence), _MSA_CHANNELS - _PROFILE - RESIDUES)
    row = torch.cat([sequence, gap, sequence if profile is None else profile, rest], -1)
    rows = row[None]
    if blocks is not None:
        gaps = torch.zeros_like(row[0]).index_fill(0, torch.tensor(_GAPS, device=row.device), 1.0)
        rows = torch.cat([rows, torch.where(blocks[..., None], row, gaps)])
    return {
        "target_feat": target,
        "msa_feat": rows,
        "msa_mask": sequence.new_ones(rows.shape[:2]),
        "aatype": sequence.detach().argmax(-1),
    }


def encode_sequence(sequence: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return one-hot residues ``[N, 20]`` of one-letter codes; zeros for other letters."""
    encoded = torch.zeros(len(sequence), RESIDUES, dtype=dtype)
    for place, letter in enumerate(sequence):
        index = rc.restype_order.get(letter)
        if index is not None:
            encoded[place, index] = 1.0
    return encoded


def decode_sequence(scores: Tensor) -> str:
    """Return the one-letter codes of the largest entries of ``scores [N, 20]``."""
    return "".join(rc.restypes[index] for index in scores.argmax(-1).tolist())
