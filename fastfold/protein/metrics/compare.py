"""Comparison of a prediction with an experimental structure: corresponding residues, and all scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import as_protein
from fastfold.protein.metrics.lddt import count_clashes, drmsd, lddt, lddt_all_atom
from fastfold.protein.metrics.tm_score import GDT_HA_CUTOFFS, GDT_TS_CUTOFFS, gdt_shares, rmsd, tm_score
from fastfold.protein.protein import Protein


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


def align_residues(sequence_a: str, sequence_b: str) -> np.ndarray:
    """Return corresponding residues of two sequences, ``[K, 2]`` int64, by their best alignment.

    BLOSUM62; gaps cost 11 to open and 1 to extend, and nothing at the ends, so that constructs with tags and structures
    with missing loops and termini are aligned. Both columns increase; the result is empty if the sequences share
    nothing.
    """
    if sequence_a == sequence_b:
        return np.stack([np.arange(len(sequence_a))] * 2, -1)
    known = (rc.aatype_to_sequence(rc.sequence_to_aatype(s)) for s in (sequence_a, sequence_b))
    first, second = known
    if not first or not second:
        return np.zeros((0, 2), np.int64)
    from Bio.Align import PairwiseAligner, substitution_matrices  # slow to import

    aligner = PairwiseAligner(mode="global", open_gap_score=-11.0, extend_gap_score=-1.0)
    aligner.end_gap_score = 0.0
    aligner.substitution_matrix = substitution_matrices.load("BLOSUM62")
    columns = [
        np.stack([np.arange(*a), np.arange(*b)], -1)
        for a, b in zip(*aligner.align(first, second)[0].aligned, strict=True)
    ]
    return np.concatenate([np.zeros((0, 2), np.int64), *columns])


def compare_structures(prediction: Any, reference: Any) -> StructureScores:
    """Match the chains of two structures and compute all scores of corresponding residues.

    Chains are matched in pairs, those with most identical residues first. Ties keep the order of chains, so copies of
    one chain are not permuted. Chains that agree in less than 30% of the shorter one are not matched.

    Args:
        prediction: A :class:`fastfold.Prediction`, :class:`fastfold.Protein`, a file, or another structure of
            :func:`fastfold.protein.io.read.read_structure`.
        reference: The same, usually of an experiment.

    Raises:
        InputError: The structures do not share a residue with an alpha carbon in both.

    Example:
        >>> import fastfold
        >>> first, second = (fastfold.predict("MTYKLILNGK", "mini", seed=seed, num_recycles=0) for seed in (0, 1))
        >>> scores = fastfold.compare_structures(first, second)
        >>> 0 <= scores.lddt_ca <= 1
        True
    """
    prediction, reference = as_protein(prediction), as_protein(reference)
    positions, present = _atoms(prediction)
    true, mask = _atoms(reference)
    moved, moved_mask = torch.zeros_like(true), torch.zeros_like(mask)
    here, there = torch.from_numpy(_match(prediction, reference)).unbind(-1)
    moved[there], moved_mask[there] = positions[here], present[here]

    ca = rc.atom_order["CA"]
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
    )


def _match(prediction: Protein, reference: Protein) -> np.ndarray:
    """Return corresponding residues ``[K, 2]`` int64 of matched chains."""
    alignments = {}
    for i, (chain, sequence) in enumerate(zip(prediction.chains, prediction.sequences, strict=True)):
        for j, (place, other) in enumerate(zip(reference.chains, reference.sequences, strict=True)):
            pairs = align_residues(sequence, other) + np.array([chain.start, place.start])
            alike = int((prediction.aatype[pairs[:, 0]] == reference.aatype[pairs[:, 1]]).sum())
            if alike >= 0.3 * min(len(sequence), len(other)):
                alignments[-alike, i, j] = pairs
    found = [np.zeros((0, 2), np.int64)]
    free = set(range(len(prediction.chains))), set(range(len(reference.chains)))
    for (_, i, j), pairs in sorted(alignments.items(), key=lambda item: item[0]):
        if i in free[0] and j in free[1]:
            found.append(pairs)
            free[0].remove(i)
            free[1].remove(j)
    return np.concatenate(found)


def _atoms(protein: Protein) -> tuple[Tensor, Tensor]:
    """Return positions and mask as tensors; positions of absent atoms are zero."""
    present = torch.from_numpy(protein.atom_mask) > 0.5
    return torch.from_numpy(protein.atom_positions).masked_fill(~present[..., None], 0.0), present.float()
