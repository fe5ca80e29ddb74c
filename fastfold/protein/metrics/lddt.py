"""Scores without superposition: lDDT of one atom per residue and of all atoms, dRMSD, and clashes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.tm_score import check_points


def lddt(
    predicted: Tensor,
    reference: Tensor,
    mask: Tensor,
    *,
    predicted_mask: Tensor | None = None,
    cutoff: float = 15.0,
    per_residue: bool = True,
) -> Tensor:
    """Compute the local distance difference test (lDDT) on one point per residue, without stereochemistry checks.

    Mariani et al. 2013 (doi:10.1093/bioinformatics/btt473), thresholds 0.5, 1, 2 and 4 Å.

    Args:
        predicted: ``[*, N, 3]`` in Å.
        reference: ``[*, N, 3]`` in Å.
        mask: ``[*, N]``, 1 or True for points of the reference.
        predicted_mask: ``[*, N]``, 1 for points of the prediction; distances to missing ones count as wrong. None for
            a complete prediction.
        cutoff: Reference distances under this count, in Å.
        per_residue: Return a score per residue; otherwise one per structure.

    Returns:
        ``[*, N]`` or ``[*]`` in [0, 1], in float32 or better; 1 if no distance counts. Distances that are not finite
        count as wrong.

    Raises:
        InputError: Shapes differ.

    Example:
        >>> import torch
        >>> from fastfold.protein import lddt
        >>> reference = 3.8 * torch.eye(3).repeat(4, 1).cumsum(0)
        >>> lddt(reference, reference, torch.ones(12), per_residue=False)
        tensor(1.)
    """
    for one in (mask, mask if predicted_mask is None else predicted_mask):
        check_points(predicted, reference, one)
    true = _distances(reference)
    mask = mask.to(true.dtype)
    counted = ~(true >= cutoff) * mask[..., :, None] * mask[..., None, :]
    counted = counted * (1.0 - torch.eye(mask.shape[-1], dtype=mask.dtype, device=mask.device))
    error = (true - _distances(predicted)).abs()
    score = sum((error < limit).to(true.dtype) for limit in (0.5, 1.0, 2.0, 4.0)) * 0.25
    if predicted_mask is not None:
        score = score * predicted_mask[..., :, None] * predicted_mask[..., None, :]
    axes = (-1,) if per_residue else (-2, -1)
    return (1e-10 + (counted * score).sum(axes)) / (1e-10 + counted.sum(axes))


def drmsd(predicted: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Compute the root mean square deviation ``[*]`` in Å of all distances between two points.

    dRMSD ignores handedness, because a mirror image has the same distances.

    Both are ``[*, N, 3]`` in Å, for dRMSD-CA the alpha carbons, and ``mask [*, N]`` is 1 for the points that count.
    With fewer than two the result is 0. Other points may have any value.

    Raises:
        InputError: Shapes differ.
    """
    check_points(predicted, reference, mask)
    pairs = (mask[..., :, None] * mask[..., None, :]).triu(1)
    squared = (_distances(predicted) - _distances(reference)).square().masked_fill(pairs == 0, 0.0)
    return ((squared * pairs).sum((-2, -1)) / pairs.sum((-2, -1)).clamp(min=1.0)).sqrt()


def _distances(points: Tensor) -> Tensor:
    points = points.to(torch.promote_types(points.dtype, torch.float32))
    return ((points[..., :, None, :] - points[..., None, :, :]).square().sum(-1) + 1e-10).sqrt()


_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
_BLOCK = 1 << 22  #: Atom pairs of a block, which limits memory

_SYMMETRIC_ATOMS = {
    "R": [("NH1", "NH2")],
    "D": [("OD1", "OD2")],
    "E": [("OE1", "OE2")],
    "F": [("CD1", "CD2"), ("CE1", "CE2")],
    "L": [("CD1", "CD2")],
    "V": [("CG1", "CG2")],
    "Y": [("CD1", "CD2"), ("CE1", "CE2")],
}


LDDT_OTHER_NAMES = np.tile(np.arange(rc.atom_type_num), (rc.restype_num + 1, 1))
for _letter, _pairs in _SYMMETRIC_ATOMS.items():
    for _pair in _pairs:
        _slots = [rc.atom_order[_name] for _name in _pair]
        LDDT_OTHER_NAMES[rc.restype_order[_letter], _slots] = _slots[::-1]
"""``[21, 37]``: slot of the atom that is equivalent in lDDT, otherwise the slot itself.

The seven residues of Mariani et al. 2013. AlphaFold's table (``restype_atom14_renaming``) has four: it keeps the names
of arginine's nitrogens, and of the two methyl groups of leucine and valine, which stereochemistry distinguishes.
"""


def lddt_all_atom(
    predicted: Tensor,
    reference: Tensor,
    mask: Tensor,
    aatype: Tensor,
    *,
    predicted_mask: Tensor | None = None,
    cutoff: float = 15.0,
    per_residue: bool = False,
) -> Tensor:
    """Compute the all-atom local distance difference test (lDDT), without stereochemistry checks.

    Mariani et al. 2013 (doi:10.1093/bioinformatics/btt473): all distances under ``cutoff`` in the reference between
    atoms of different residues. In residues with equivalent atoms (:data:`LDDT_OTHER_NAMES`) both namings of the
    prediction are scored against the unambiguous atoms of the other residues, and the better one is used.

    Args:
        predicted: atom37 positions ``[N, 37, 3]`` in Å.
        reference: ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for atoms of the reference.
        aatype: ``[N]`` residue types of the reference.
        predicted_mask: ``[N, 37]``, as of :func:`lddt`.
        cutoff: As of :func:`lddt`.
        per_residue: Return a score per residue; otherwise one for the structure.

    Returns:
        ``[N]`` or a scalar in [0, 1]; 1 if no distance counts.
    """
    score, count = _conserved_distances(predicted, reference, mask, aatype, predicted_mask, None, cutoff)
    if not per_residue:
        score, count = score.sum(), count.sum()
    return torch.where(count > 0, score / count.clamp(min=1.0), 1.0).to(reference.dtype)


def lddt_interface(
    predicted: Tensor,
    reference: Tensor,
    mask: Tensor,
    aatype: Tensor,
    chain_index: Tensor,
    *,
    predicted_mask: Tensor | None = None,
    cutoff: float = 15.0,
) -> float | None:
    """Compute the all-atom lDDT of distances between chains alone (iLDDT of OpenStructure).

    Atoms with two names are named by the distances between chains as well.

    Args:
        predicted: As of :func:`lddt_all_atom`, with ``reference``, ``mask``, ``aatype`` and ``predicted_mask``.
        reference: ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``.
        aatype: ``[N]``.
        chain_index: ``[N]`` chain of each residue.
        predicted_mask: ``[N, 37]``.
        cutoff: As of :func:`lddt`.

    Returns:
        The score in [0, 1]; None if no two chains of the reference are under the cutoff.
    """
    if len(chain_index.unique()) < 2:
        return None
    score, count = _conserved_distances(
        predicted, reference, mask, aatype, predicted_mask, chain_index, cutoff
    )
    total = float(count.sum())
    return float(score.sum()) / total if total else None


def _conserved_distances(
    predicted: Tensor,
    reference: Tensor,
    mask: Tensor,
    aatype: Tensor,
    predicted_mask: Tensor | None,
    chain_index: Tensor | None,
    cutoff: float,
) -> tuple[Tensor, Tensor]:
    """Sum conserved shares and numbers of each residue's distances ``[N]``, those between chains if they are given."""
    present = mask > 0.5
    residue, slot = present.nonzero(as_tuple=True)
    group = residue if chain_index is None else chain_index[residue]
    other = torch.from_numpy(LDDT_OTHER_NAMES).to(aatype.device)[aatype.long()][residue, slot]
    true = reference[present]
    has = torch.ones_like(present) if predicted_mask is None else predicted_mask > 0.5
    # Distances to missing atoms must count as wrong: they are infinite, or NaN between two missing ones.
    atoms = predicted.masked_fill(~has[..., None], torch.inf)
    straight, swapped = atoms[residue, slot], atoms[residue, other]

    ambiguous = other != slot
    rows, columns = ambiguous.nonzero().squeeze(-1), (~ambiguous).nonzero().squeeze(-1)
    gain = torch.zeros(len(mask), dtype=torch.float64, device=true.device)
    for i, j, distance in _near_pairs(true, rows, columns, cutoff):
        apart = group[i] != group[j]
        i, j, distance = i[apart], j[apart], distance[apart]
        difference = _conserved(swapped[i], straight[j], distance) - _conserved(
            straight[i], straight[j], distance
        )
        gain.index_add_(0, residue[i], difference.double())
    chosen = torch.where((gain > 0)[residue, None], swapped, straight)

    score, count = torch.zeros_like(gain), torch.zeros_like(gain)
    everything = torch.arange(len(true), device=true.device)
    for i, j, distance in _near_pairs(true, everything, everything, cutoff):
        once = (residue[i] < residue[j]) & (group[i] != group[j])
        i, j, distance = i[once], j[once], distance[once]
        kept = _conserved(chosen[i], chosen[j], distance).double()
        for end in (i, j):
            score.index_add_(0, residue[end], kept)
            count.index_add_(0, residue[end], torch.ones_like(kept))
    return score, count


def count_clashes(
    positions: Tensor, mask: Tensor, residue_index: Tensor, chain_index: Tensor, *, tolerance: float = 1.5
) -> int:
    """Count atom pairs of different residues that are nearer than their van der Waals radii allow.

    The definition of AlphaFold's violation loss (supplement, section 1.9.11): nearer than the sum of the radii less
    1.5 Å, heavy atoms only. A peptide bond is not a clash, nor are two cysteine sulphurs. (MolProbity's
    clash score counts overlaps over 0.4 Å with explicit hydrogens, which these structures lack.)

    Args:
        positions: atom37 ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 where the atom is present.
        residue_index: ``[N]`` residue numbers; neighbours in a chain differ by 1.
        chain_index: ``[N]``.
        tolerance: Allowed overlap in Å.
    """
    present = mask > 0.5
    residue, slot = present.nonzero(as_tuple=True)
    points = positions[present]
    c, n = rc.atom_order["C"], rc.atom_order["N"]
    everything = torch.arange(len(points), device=points.device)
    count = 0
    for i, j, distance in _near_pairs(points, everything, everything, _reach(tolerance)):
        before, after = residue[i], residue[j]
        clash = (before < after) & _overlaps(slot[i], slot[j], distance, tolerance)
        follows = (residue_index[after] - residue_index[before] == 1) & (
            chain_index[after] == chain_index[before]
        )
        bonded = follows & (slot[i] == c) & (slot[j] == n)
        count += int((clash & ~bonded).sum())
    return count


def chain_clashes(
    positions: Tensor, mask: Tensor, chain_index: Tensor, *, tolerance: float = 1.5, cutoff: float = 1.1
) -> tuple[Tensor, Tensor]:
    """Count atoms of different chains that stand too close.

    Positions, mask and tolerance are those of :func:`count_clashes`. ``chain_index [N]`` is 0, ..., 0, 1, ..., 1, and
    so on, for ``C`` chains. The cutoff is in Å.

    Returns:
        Pairs of atoms ``[C, C]`` that clash as :func:`count_clashes` defines it, symmetric, and atoms ``[C]`` of each
        chain within the cutoff of another chain.
    """
    present = mask > 0.5
    residue, slot = present.nonzero(as_tuple=True)
    points = positions[present]
    chain = chain_index[residue]
    atoms = [(chain == number).nonzero().squeeze(-1) for number in range(int(chain_index.max()) + 1)]
    reach = max(_reach(tolerance), cutoff)
    pairs = torch.zeros(len(atoms), len(atoms), dtype=torch.long)
    is_close = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for a, b in itertools.combinations(range(len(atoms)), 2):
        # Chains touch in a small part of the box around them.
        rows = _within_box(points, atoms[a], atoms[b], reach)
        columns = _within_box(points, atoms[b], rows, reach)
        for i, j, distance in _near_pairs(points, rows, columns, reach):
            pairs[a, b] += int(_overlaps(slot[i], slot[j], distance, tolerance).sum())
            for end in (i, j):
                is_close[end[distance < cutoff]] = True
    return pairs + pairs.T, torch.stack([is_close[rows].sum() for rows in atoms])


def _within_box(points: Tensor, atoms: Tensor, others: Tensor, margin: float) -> Tensor:
    """Select atoms in the box around others, widened by ``margin`` in Å."""
    if not len(others):
        return others
    low, high = points[others].amin(0) - margin, points[others].amax(0) + margin
    return atoms[((points[atoms] >= low) & (points[atoms] <= high)).all(-1)]


def _overlaps(first: Tensor, second: Tensor, distance: Tensor, tolerance: float) -> Tensor:
    """Tell which pairs of atoms are too near: slots and distances ``[P]``, bridges of sulphurs apart."""
    radii = torch.tensor([rc.element_radius[name[0]] for name in rc.atom_types], device=distance.device)
    sulphur = rc.atom_order["SG"]
    bridge = (first == sulphur) & (second == sulphur)
    return (distance < radii[first] + radii[second] - tolerance) & ~bridge


def _reach(tolerance: float) -> float:
    """Largest distance in Å at which two atoms can clash."""
    return 2.0 * max(rc.element_radius.values()) - tolerance


def _near_pairs(
    points: Tensor, rows: Tensor, columns: Tensor, cutoff: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield pairs of ``points [A, 3]`` under ``cutoff``: indices from ``rows`` and ``columns``, and distances in Å."""
    if len(columns) == 0:
        return
    for block in rows.split(max(1, _BLOCK // len(columns))):
        distance = torch.cdist(points[block], points[columns], compute_mode="donot_use_mm_for_euclid_dist")
        i, j = (distance < cutoff).nonzero(as_tuple=True)
        yield block[i], columns[j], distance[i, j]


def _conserved(a: Tensor, b: Tensor, distance: Tensor) -> Tensor:
    """Return the share ``[P]`` of the four thresholds that the distances' errors are under."""
    error = ((a - b).square().sum(-1).sqrt() - distance).abs()
    return torch.stack([(error < limit) for limit in _THRESHOLDS]).to(distance.dtype).mean(0)
