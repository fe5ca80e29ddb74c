"""Scores of a prediction against the structure that the network was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastfold.data.templates.whole.given import GivenStructure
from fastfold.inference.output.prediction import Prediction
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import observed_chain
from fastfold.protein.metrics.tm_score import rmsd, superpose, tm_score
from fastfold.protein.structure import ChainStructure


def compare_with_given(prediction: Prediction, given: GivenStructure) -> dict[str, Any]:
    """Compare a prediction with the structure that the network was given, whose chains are in the same order.

    Scores are named ``file``, ``use``, ``tm_score`` of the CA atoms, normalised by all residues, ``rmsd`` in Å, and
    ``composite``, AF2Rank's product of pLDDT (0 to 1), pTM and TM-score; None without pTM. A complex also has
    ``binder_plddt`` of the first chain, ``interaction_pae`` in Å, the mean between it and the others, and
    ``binder_rmsd`` and ``binder_rmsd_on_target`` in Å: of the first chain, superposed on itself and on the others.
    """
    chains = [observed_chain(chain) for chain in given.read().chains]
    predicted, true, mask = _ca_atoms(prediction, chains)
    found: dict[str, Any] = {
        "file": given.path.name,
        "use": given.use,
        "tm_score": tm_score(predicted, true, mask, reference_length=len(mask)),
        "rmsd": float(rmsd(predicted, true, mask)),
        "composite": None,
    }
    if prediction.ptm is not None:
        found["composite"] = prediction.mean_plddt / 100 * float(prediction.ptm) * found["tm_score"]
    if len(chains) > 1:
        found |= _of_binder(prediction, predicted, true, mask)
    return found


def _ca_atoms(
    prediction: Prediction, chains: Sequence[ChainStructure]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return CA positions ``[N, 3]`` of prediction and structure, and the mask ``[N]`` of common ones, in float64."""
    ca = rc.atom_order["CA"]
    true = np.concatenate([chain.positions[:, ca] for chain in chains])
    mask = np.concatenate([chain.mask[:, ca] for chain in chains]) * (prediction.atom_mask[:, ca] > 0.5)
    predicted = prediction.atom_positions[:, ca]
    return tuple(torch.from_numpy(np.asarray(x, np.float64)) for x in (predicted, true, mask))  # type: ignore[return-value]


def _of_binder(
    prediction: Prediction, predicted: torch.Tensor, true: torch.Tensor, mask: torch.Tensor
) -> dict[str, Any]:
    """Return dl_binder_design's scores, whose binder is the first chain."""
    first = prediction.chain_index == prediction.chain_index[0]
    found: dict[str, Any] = {
        "binder_plddt": float(prediction.plddt[first].mean(dtype=np.float64)),
        "interaction_pae": None,
    }
    if prediction.pae is not None:
        pae = prediction.pae.astype(np.float64)
        found["interaction_pae"] = float((pae[first][:, ~first].mean() + pae[~first][:, first].mean()) / 2)
    binder = torch.from_numpy(first) * mask
    moved = superpose(predicted, true, mask - binder)[..., None].apply(predicted)
    squared = (moved - true).square().sum(-1)
    found["binder_rmsd"] = float(rmsd(predicted, true, binder))
    found["binder_rmsd_on_target"] = float(((squared * binder).sum() / binder.sum().clamp(min=1)).sqrt())
    return found
