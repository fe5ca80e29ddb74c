"""Validation: fold known chains and complexes and compare with what the experiment saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.data.features.pipeline import FeatureSampler, sampler_from_merged, sampler_from_raw
from fastfold.data.features.raw import msa_features, sequence_features, template_features
from fastfold.data.msa.msa import Msa
from fastfold.data.training.complex_entry import ComplexData
from fastfold.data.training.complex_sample import copies_of_residues, in_feature_order, merged_features
from fastfold.data.training.entry import EntryData
from fastfold.evoformer.heads import plddt
from fastfold.evoformer.model import AlphaFold
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.lddt import lddt
from fastfold.protein.metrics.tm_score import tm_score
from fastfold.protein.structure import ChainStructure
from fastfold.training.chain_permutation import exchanged_atoms

_CA = rc.atom_order["CA"]


@dataclass(frozen=True)
class ChainScore:
    """How one chain or complex was folded.

    Attributes:
        id: Its name.
        residues: Its length, all chains together.
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


def score_entry(
    model: AlphaFold, name: str, data: EntryData | ComplexData, tree: Any, recycles: int
) -> ChainScore:
    """Fold a chain or a complex and compare it with its structure.

    Args:
        model: The network, in evaluation mode.
        name: What to call it.
        data: Structure and alignments; a complex for a multimer network.
        tree: Config tree of the network.
        recycles: Recycling iterations.
    """
    if isinstance(data, ComplexData):
        return score_complex(model, name, data, tree, recycles)
    return score_chain(model, name, data.chain, data.alignments, tree, recycles)


def score_chain(
    model: AlphaFold, name: str, chain: ChainStructure, alignments: Sequence[Msa], tree: Any, recycles: int
) -> ChainScore:
    """Fold a chain with a monomer network and compare it with its structure.

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
    predicted, estimate = _fold(model, sampler_from_raw(raw, tree, seed=0), recycles)
    return _score(name, predicted, estimate, chain.positions[:, _CA], chain.mask[:, _CA])


def score_complex(model: AlphaFold, name: str, data: ComplexData, tree: Any, recycles: int) -> ChainScore:
    """Fold a complex with a multimer network and compare the whole of it with its structure.

    Equal chains of the structure are taken in the order that fits the prediction best.

    Args:
        model: The network, in evaluation mode.
        name: The complex's name.
        data: Its chains and alignments.
        tree: Config tree of the network.
        recycles: Recycling iterations.
    """
    chains, alignments = in_feature_order(data.chains, data.alignments)
    merged = merged_features(chains, alignments, None)
    predicted, estimate = _fold(model, sampler_from_merged(merged, tree, seed=0), recycles)
    positions = np.concatenate([chain.positions for chain in chains])
    mask = np.concatenate([chain.mask for chain in chains])
    copies = copies_of_residues(merged, positions, mask, np.arange(len(mask)))
    if copies:
        found = exchanged_atoms(
            predicted,
            torch.as_tensor(merged["asym_id"]),
            torch.as_tensor(merged["entity_id"]),
            {key: torch.as_tensor(x) for key, x in copies.items()},
        )
        positions, mask = found["all_atom_positions"].numpy(), found["all_atom_mask"].numpy()
    return _score(name, predicted, estimate, positions[:, _CA], mask[:, _CA])


def _fold(model: AlphaFold, sampler: FeatureSampler, recycles: int) -> tuple[Tensor, Tensor]:
    """Predicted CA positions ``[N, 3]`` in Å and lDDT ``[N]``, 0 to 1, on the CPU."""
    device = model.single_projection.weight.device
    with torch.no_grad():
        result = model(
            lambda cycle, member: {
                key: torch.as_tensor(x, device=device) for key, x in sampler.sample(cycle, member).items()
            },
            recycles,
        )
        predicted = result["structure_module"]["final_atom_positions"][:, _CA].float().cpu()
        return predicted, plddt(result["predicted_lddt"]["logits"].float()).cpu() / 100


def _score(
    name: str, predicted: Tensor, estimate: Tensor, positions: np.ndarray, observed: np.ndarray
) -> ChainScore:
    """Compare CA positions with those of the experiment, ``[N, 3]`` in Å and their mask ``[N]``."""
    reference, mask = torch.as_tensor(positions), torch.as_tensor(observed)
    per_residue = lddt(predicted, reference, mask)
    resolved = mask > 0
    return ChainScore(
        id=name,
        residues=len(mask),
        lddt_ca=float(lddt(predicted, reference, mask, per_residue=False)),
        tm_score=tm_score(predicted, reference, mask),
        mean_plddt=float(estimate.mean()),
        true=per_residue[resolved].numpy(),
        predicted=estimate[resolved].numpy(),
    )
