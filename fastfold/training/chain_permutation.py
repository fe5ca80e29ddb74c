"""Exchange of the labels of equal chains to fit the prediction."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastfold.data.training.labels import structure_labels
from fastfold.evoformer.losses.permutation import permute_labels, split_chains


def exchange_chains(
    predicted_ca: Tensor, batch: Mapping[str, Tensor], copies: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the batch with the labels of a sample's equal chains exchanged to fit the prediction best.

    See Evans et al. 2021, section 7.3. ``predicted_ca [n, 3]`` in Å is detached from the graph. The batch has the
    sample's features of one iteration and its labels; ``copies`` are the atoms of the sample's other copies
    (:func:`fastfold.data.training.sample.complex_sample`), and may be empty.
    """
    if not copies:
        return dict(batch)
    found = exchanged_atoms(predicted_ca, batch["asym_id"], batch["entity_id"], copies)
    if all(torch.equal(found[name], batch[name]) for name in found):
        return dict(batch)
    labels = structure_labels(
        batch["aatype"].cpu().numpy(),
        found["all_atom_positions"].cpu().numpy(),
        found["all_atom_mask"].cpu().numpy(),
        resolution=float(batch["resolution"]),
    )
    device = predicted_ca.device
    return dict(batch) | {name: torch.as_tensor(x, device=device) for name, x in labels.items()}


def exchanged_atoms(
    predicted_ca: Tensor, asym_id: Tensor, entity_id: Tensor, copies: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``all_atom_positions [n, 37, 3]`` (Å) and ``all_atom_mask [n, 37]`` of the chains that fit best.

    ``asym_id [n]`` is the chain of each residue, and ``entity_id [n]`` equal for chains of one sequence. For the others
    see :func:`exchange_chains`; ``copies`` is not empty.
    """
    atoms = ("all_atom_positions", "all_atom_mask")
    whole = {name: copies[name] for name in (*atoms, "asym_id", "entity_id", "residue_index")}
    chains = split_chains(whole, copies["asym_id"])
    return permute_labels(predicted_ca.detach(), asym_id, entity_id, copies["residue"], chains)
