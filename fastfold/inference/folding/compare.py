"""Scores of a prediction against the structure that the network was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastfold.data.templates.whole.given import GivenStructure
from fastfold.inference.output.prediction import Prediction
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.chain_mapping import ChainMap, chain_candidates, map_chains
from fastfold.protein.metrics.tm_score import rmsd, superpose, tm_score
from fastfold.protein.structure import ChainStructure, structure_to_protein
from fastfold.protein.validation import check_structure


def compare_with_given(prediction: Prediction, source: GivenStructure) -> dict[str, Any]:
    """Compare a prediction with the structure that the network was given, whose chains are in the same order.

    Chains of one sequence are exchangeable, also if they lack other residues: they are compared by the mapping with the
    largest TM-score.

    Scores are named ``file``, ``use``, ``tm_score`` of the CA atoms, normalised by all residues, ``rmsd`` in Å, and
    ``composite``, AF2Rank's product of pLDDT (0 to 1), pTM and TM-score; None without pTM. A complex also has
    ``chain_mapping`` of the prediction's chains to the given ones, ``binder_plddt`` of the first chain,
    ``interaction_pae`` in Å, the mean between it and the others, and ``binder_rmsd`` and ``binder_rmsd_on_target`` in
    Å: of the first chain, superposed on itself and on the others. ``geometry`` is the check of the given structure
    (:meth:`fastfold.protein.validation.StructureCheck.to_dict`).
    """
    structure = source.read()
    chains = structure.chains
    predicted, true, mask, mapping = _ca_atoms(prediction, chains)
    scores: dict[str, Any] = {
        "file": source.path.name,
        "use": source.use,
        "tm_score": tm_score(predicted, true, mask, reference_length=len(mask)),
        "rmsd": float(rmsd(predicted, true, mask)),
        "composite": None,
        "geometry": check_structure(structure_to_protein(structure)).to_dict(),
    }
    if prediction.ptm is not None:
        scores["composite"] = prediction.mean_plddt / 100 * float(prediction.ptm) * scores["tm_score"]
    if len(chains) > 1:
        own = prediction.author_names.chain_ids
        names = {own[i]: chains[j].chain_id for i, j in mapping}
        scores |= {"chain_mapping": names} | _of_binder(
            prediction, predicted, true, mask, dict(mapping), length=len(chains[0])
        )
    return scores


def _ca_atoms(
    prediction: Prediction, chains: Sequence[ChainStructure]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ChainMap]:
    """Return CA positions ``[N, 3]`` of prediction and structure, and the mask ``[N]`` of common ones, in float64.

    The prediction's residues are in the places of the structure's, by the mapping that is returned as well.
    """
    ca = rc.atom_order["CA"]
    true = np.concatenate([chain.positions[:, ca] for chain in chains])
    resolved = np.concatenate([chain.mask[:, ca] for chain in chains])
    arrays = (prediction.atom_positions[:, ca], true, prediction.atom_mask[:, ca] > 0.5, resolved)
    predicted, positions, has, known = (torch.from_numpy(np.asarray(x, np.float64)) for x in arrays)
    sequences, indices = [one.sequence for one in chains], [one.residue_index for one in chains]
    candidates = chain_candidates(sequences, sequences, indices=(indices, indices), identity=1.0)
    mapping = map_chains(candidates, predicted, positions, has, known)
    ours, theirs = torch.from_numpy(candidates.rows(mapping)).unbind(-1)
    moved, moved_mask = torch.zeros_like(predicted), torch.zeros_like(has)
    moved[theirs], moved_mask[theirs] = predicted[ours], has[ours]
    return moved, positions, moved_mask * known, mapping


def _of_binder(
    prediction: Prediction,
    predicted: torch.Tensor,
    true: torch.Tensor,
    mask: torch.Tensor,
    mapping: Mapping[int, int],
    *,
    length: int,
) -> dict[str, Any]:
    """Return dl_binder_design's scores, whose binder is the given structure's first chain, of this ``length``."""
    own = next(i for i, j in mapping.items() if j == 0)
    first = prediction.chain_index == own
    scores: dict[str, Any] = {
        "binder_plddt": float(prediction.plddt[first].mean(dtype=np.float64)),
        "interaction_pae": None,
    }
    if prediction.pae is not None:
        pae = prediction.pae.astype(np.float64)
        scores["interaction_pae"] = float((pae[first][:, ~first].mean() + pae[~first][:, first].mean()) / 2)
    is_binder = torch.arange(len(mask)) < length
    binder = is_binder * mask
    moved = superpose(predicted, true, mask - binder)[..., None].apply(predicted)
    squared = (moved - true).square().sum(-1)
    scores["binder_rmsd"] = float(rmsd(predicted, true, binder))
    scores["binder_rmsd_on_target"] = float(((squared * binder).sum() / binder.sum().clamp(min=1)).sqrt())
    return scores
