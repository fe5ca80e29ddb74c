"""Validation: fold known chains and compare with what the experiment saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastfold.data.alignment import Msa
from fastfold.data.chain_structure import ChainStructure
from fastfold.data.features import sampler_from_raw
from fastfold.data.raw_features import msa_features, sequence_features, template_features
from fastfold.evoformer.confidence import plddt
from fastfold.evoformer.model import AlphaFold
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics import lddt
from fastfold.protein.metrics_superposed import tm_score


@dataclass(frozen=True)
class ChainScore:
    """How one chain was folded.

    Attributes:
        id: The chain's name.
        residues: Its length.
        lddt_ca: 0 to 1.
        tm_score: On alpha carbons, normalised by the residues that the experiment resolved.
        mean_plddt: Predicted, 0 to 1.
        true: lDDT-CA per resolved residue, 0 to 1.
        predicted: The network's estimate of it.
    """

    id: str
    residues: int
    lddt_ca: float
    tm_score: float
    mean_plddt: float
    true: np.ndarray
    predicted: np.ndarray


def score_chain(
    model: AlphaFold, name: str, chain: ChainStructure, alignments: Sequence[Msa], tree: Any, recycles: int
) -> ChainScore:
    """Fold a chain and compare it with its structure.

    Args:
        model: The network, in evaluation mode.
        name: The chain's name.
        chain: Sequence and structure.
        alignments: Its alignments; may be empty.
        tree: Config tree of the network.
        recycles: Recycling iterations.
    """
    raw = sequence_features(chain.sequence) | msa_features(alignments, chain.sequence)
    raw |= template_features({}, len(chain)) | {"residue_index": chain.residue_index}
    sampler = sampler_from_raw(raw, tree, seed=0)
    device = model.single_projection.weight.device
    ca = rc.atom_order["CA"]
    with torch.no_grad():
        result = model(
            lambda cycle, member: {
                key: torch.as_tensor(x, device=device) for key, x in sampler.sample(cycle, member).items()
            },
            recycles,
        )
        predicted = result["structure_module"]["final_atom_positions"][:, ca].float().cpu()
        estimate = plddt(result["predicted_lddt"]["logits"].float()).cpu() / 100
    reference, mask = torch.as_tensor(chain.positions[:, ca]), torch.as_tensor(chain.mask[:, ca])
    per_residue = lddt(predicted, reference, mask)
    resolved = mask > 0
    return ChainScore(
        id=name,
        residues=len(chain),
        lddt_ca=float(lddt(predicted, reference, mask, per_residue=False)),
        tm_score=tm_score(predicted, reference, mask),
        mean_plddt=float(estimate.mean()),
        true=per_residue[resolved].numpy(),
        predicted=estimate[resolved].numpy(),
    )
