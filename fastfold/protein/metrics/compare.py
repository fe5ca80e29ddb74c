"""Comparison of a prediction with an experimental structure: corresponding residues, and all scores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import named_protein
from fastfold.protein.labels import AuthorNames
from fastfold.protein.metrics.chain_mapping import ChainMap, chain_candidates, map_chains
from fastfold.protein.metrics.interface.dockq import complex_dockq
from fastfold.protein.metrics.lddt import count_clashes, drmsd, lddt, lddt_all_atom, lddt_interface
from fastfold.protein.metrics.tm_score import (
    GDT_HA_CUTOFFS,
    GDT_TS_CUTOFFS,
    check_finite,
    gdt_shares,
    rmsd,
    tm_score,
)
from fastfold.protein.protein import Protein


@dataclass(frozen=True)
class InterfaceScores:
    """Scores of an interface of the reference, a pair of chains with residues under 5 Å."""

    chains: tuple[str, str]  #: Names of the chains in the reference
    predicted_chains: tuple[str, str]  #: Names of their chains in the prediction
    dockq: float  #: DockQ, in [0, 1]
    fnat: float  #: Share of the reference's contacts that the prediction has
    f1: float  #: F1 of the contacts
    irmsd: float | None  #: RMSD of the interface's backbone in Å; None without a common atom
    lrmsd: float | None  #: RMSD of the smaller chain's backbone in Å, with the larger one superposed
    lddt: float | None  #: lDDT of the distances between both chains


@dataclass(frozen=True)
class StructureScores:
    """Scores of a prediction against a reference, normalised by the whole reference."""

    lddt_ca: float  #: lDDT on the alpha carbons, in [0, 1]
    lddt: float  #: lDDT on all heavy atoms
    tm_score: float  #: TM-score
    gdt_ts: float  #: GDT total score, in [0, 1]
    gdt_ha: float  #: GDT high accuracy
    rmsd_ca: float  #: RMSD in Å over the common residues, after one superposition
    drmsd_ca: float  #: dRMSD in Å over the common residues
    clashes: (
        int  #: Clashing atom pairs in the prediction (:func:`fastfold.protein.metrics.lddt.count_clashes`)
    )
    aligned_residues: int  #: Number of residues with an alpha carbon in both structures
    reference_residues: int  #: Number of residues with an alpha carbon in the reference
    lddt_ca_per_residue: (
        np.ndarray
    )  #: ``[N]`` float32 for each residue of the reference, NaN without alpha carbon
    #: ``[N]`` int64, row of the reference for each residue of the prediction; -1 for none
    reference_rows: np.ndarray
    #: Name of each mapped chain of the prediction, with the name of its chain in the reference
    chain_mapping: Mapping[str, str]
    lddt_interface: (
        float | None
    )  #: lDDT of distances between chains (iLDDT); None if no chains are near each other
    dockq: float | None  #: Mean DockQ of the interfaces (GlobalDockQ); None without an interface
    #: Mapping with the largest DockQ, which may differ from ``chain_mapping``; interfaces are scored under it
    dockq_mapping: Mapping[str, str]
    interfaces: tuple[InterfaceScores, ...]  #: Interfaces of the reference whose chains are mapped


def compare_structures(prediction: Any, reference: Any) -> StructureScores:
    """Map the chains of two structures and compute all scores of corresponding residues.

    Copies of a chain are exchangeable: the mapping with the largest TM-score of the whole complex is used
    (:mod:`fastfold.protein.metrics.chain_mapping`), that of the given order if several are equal. Chains that agree in
    less than 30% of the shorter one are not mapped. DockQ has a mapping of its own.

    Args:
        prediction: A :class:`fastfold.Prediction`, :class:`fastfold.Protein`, a file, or another structure of
            :func:`fastfold.protein.io.read.read_structure`.
        reference: The same, usually of an experiment.

    Raises:
        InputError: The structures do not share a residue with an alpha carbon in both, or a position is not finite.

    Example:
        >>> import fastfold
        >>> first, second = (fastfold.predict("MTYKLILNGK", "mini", seed=seed, num_recycles=0) for seed in (0, 1))
        >>> scores = fastfold.compare_structures(first, second)
        >>> 0 <= scores.lddt_ca <= 1
        True
    """
    (prediction, names), (reference, true_names) = named_protein(prediction), named_protein(reference)
    positions, present = _atoms(prediction)
    true, mask = _atoms(reference)
    ca = rc.atom_order["CA"]
    candidates = chain_candidates(
        prediction.sequences,
        reference.sequences,
        indices=(_numbers(prediction, names), _numbers(reference, true_names)),
    )
    mapping = map_chains(candidates, positions[:, ca], true[:, ca], present[:, ca], mask[:, ca])
    rows = candidates.rows(mapping)
    moved, moved_mask = _moved(positions, present, rows, len(reference))
    reference_rows = np.full(len(prediction), -1)
    reference_rows[rows[:, 0]] = rows[:, 1]

    points, truth = moved[:, ca], true[:, ca]
    has, resolved = moved_mask[:, ca], mask[:, ca]
    common = has * resolved
    aligned, length = int(common.sum()), int(resolved.sum())
    if aligned == 0:
        raise InputError(
            "the prediction and the reference do not share a residue; "
            "check that the reference is a structure of the same protein"
        )
    cutoffs = sorted({*GDT_TS_CUTOFFS, *GDT_HA_CUTOFFS})
    shares = dict(zip(cutoffs, gdt_shares(points, truth, common, cutoffs, length), strict=True))
    per_residue = lddt(points, truth, resolved, predicted_mask=has)
    aatype = torch.from_numpy(reference.aatype)
    numbers, chains = (torch.from_numpy(x).long() for x in (prediction.residue_index, prediction.chain_index))
    true_chains = torch.from_numpy(reference.chain_index)
    quality = complex_dockq(prediction, reference, candidates, mapping)
    return StructureScores(
        lddt_ca=lddt(points, truth, resolved, predicted_mask=has, per_residue=False).item(),
        lddt=lddt_all_atom(moved, true, mask, aatype, predicted_mask=moved_mask).item(),
        tm_score=tm_score(points, truth, common, reference_length=length),
        gdt_ts=sum(shares[c] for c in GDT_TS_CUTOFFS) / len(GDT_TS_CUTOFFS),
        gdt_ha=sum(shares[c] for c in GDT_HA_CUTOFFS) / len(GDT_HA_CUTOFFS),
        rmsd_ca=rmsd(points, truth, common).item(),
        drmsd_ca=drmsd(points, truth, common).item(),
        clashes=count_clashes(positions, present, numbers, chains),
        aligned_residues=aligned,
        reference_residues=length,
        lddt_ca_per_residue=torch.where(resolved > 0.5, per_residue, torch.nan).float().numpy(),
        reference_rows=reference_rows,
        chain_mapping=_named(mapping, names, true_names),
        lddt_interface=lddt_interface(moved, true, mask, aatype, true_chains, predicted_mask=moved_mask),
        dockq=quality.dockq,
        dockq_mapping=_named(quality.mapping, names, true_names),
        interfaces=tuple(
            InterfaceScores(
                chains=_pair(one.chains, true_names),
                predicted_chains=_pair(one.predicted_chains, names),
                dockq=one.dockq,
                fnat=one.fnat,
                f1=one.f1,
                irmsd=one.irmsd,
                lrmsd=one.lrmsd,
                lddt=_lddt_of_pair(prediction, reference, candidates.rows(quality.mapping), one.chains),
            )
            for one in quality.interfaces
        ),
    )


def _numbers(protein: Protein, names: AuthorNames) -> list[np.ndarray]:
    """Return the residue numbers of each chain, which show the gaps between parts of a protein.

    The residue index of a file counts the residues that it lists, and is used where numbers do not rise.
    """
    numbers = []
    for chain in protein.chains:
        own = names.numbers[chain]
        known = np.array([int(one) for one in own if re.fullmatch(r"-?\d+", one)])
        is_rising = len(known) == len(own) and bool((np.diff(known) > 0).all())
        numbers.append(known if is_rising else protein.residue_index[chain])
    return numbers


def _lddt_of_pair(
    prediction: Protein, reference: Protein, rows: np.ndarray, chains: tuple[int, int]
) -> float | None:
    """Return the lDDT of distances between two chains of the reference, from corresponding residues ``[K, 2]``."""
    true, mask = _atoms(reference)
    moved, moved_mask = _moved(*_atoms(prediction), rows, len(reference))
    chain_index = torch.from_numpy(reference.chain_index)
    kept = torch.isin(chain_index, torch.tensor(chains))
    aatype = torch.from_numpy(reference.aatype)
    return lddt_interface(
        moved[kept], true[kept], mask[kept], aatype[kept], chain_index[kept], predicted_mask=moved_mask[kept]
    )


def _moved(positions: Tensor, mask: Tensor, rows: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Return positions ``[length, 37, 3]`` and mask of a prediction in the places of corresponding residues."""
    here, there = torch.from_numpy(rows).unbind(-1)
    moved, moved_mask = (
        positions.new_zeros(length, *positions.shape[1:]),
        mask.new_zeros(length, mask.shape[1]),
    )
    moved[there], moved_mask[there] = positions[here], mask[here]
    return moved, moved_mask


def _named(mapping: ChainMap, names: AuthorNames, true_names: AuthorNames) -> dict[str, str]:
    return {names.chain_ids[i]: true_names.chain_ids[j] for i, j in mapping}


def _pair(chains: tuple[int, int], names: AuthorNames) -> tuple[str, str]:
    first, second = (names.chain_ids[number] for number in chains)
    return first, second


def _atoms(protein: Protein) -> tuple[Tensor, Tensor]:
    """Return positions and mask as tensors; positions of absent atoms are zero, others must be finite."""
    present = torch.from_numpy(protein.atom_mask) > 0.5
    check_finite(torch.from_numpy(protein.atom_positions)[present])
    return torch.from_numpy(protein.atom_positions).masked_fill(~present[..., None], 0.0), present.float()
