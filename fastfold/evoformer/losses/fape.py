"""Frame aligned point error (supplement Algorithm 28) on the backbone and on all atoms (Algorithm 20)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.evoformer.losses.masked import used_indices
from fastfold.protein.rigid import Rigid, quaternion_to_rotation


def frame_aligned_point_error(
    predicted: Rigid,
    target: Rigid,
    frames_mask: Tensor,
    predicted_points: Tensor,
    target_points: Tensor,
    points_mask: Tensor,
    *,
    length_scale: float,
    clamp_distance: float | None,
    pair_mask: Tensor | None = None,
    eps: float = 1e-4,
) -> Tensor:
    """Return the mean distance between points in predicted frames and in true frames.

    Args:
        predicted: Frames ``[*, F]``, Å.
        target: Frames ``[*, F]``, Å.
        frames_mask: ``[*, F]``.
        predicted_points: ``[*, P, 3]`` in Å.
        target_points: ``[*, P, 3]`` in Å.
        points_mask: ``[*, P]``.
        length_scale: Unit of the result in Å.
        clamp_distance: Largest error that counts, in Å; None for no clamping.
        pair_mask: ``[*, F, P]``, 1 for the pairs of frame and point that count; None for all.
        eps: Added to squared errors and to the count.

    Returns:
        ``[*]``.
    """
    # About half of the 8 frames and 14 atoms of a residue do not exist, so most pairs can be skipped.
    frames, points = used_indices(frames_mask), used_indices(points_mask)
    predicted, target = predicted[..., frames], target[..., frames]
    predicted_points, target_points = predicted_points[..., points, :], target_points[..., points, :]
    frames_mask, points_mask = frames_mask[..., frames], points_mask[..., points]

    (x, y, z), (true_x, true_y, true_z) = _seen(predicted, predicted_points), _seen(target, target_points)
    error = ((x - true_x).square() + (y - true_y).square() + (z - true_z).square() + eps).sqrt()
    if clamp_distance is not None:
        error = error.clamp(max=clamp_distance)
    weight = frames_mask[..., :, None] * points_mask[..., None, :]
    count = frames_mask.sum(-1) * points_mask.sum(-1)
    if pair_mask is not None:
        weight = weight * pair_mask[..., frames, :][..., points]
        count = weight.sum((-2, -1))
    return (error * weight).sum((-2, -1)) / (length_scale * (eps + count))


def _seen(frames: Rigid, points: Tensor) -> list[Tensor]:
    """Return the three coordinates ``[*, F, P]`` of ``points [*, P, 3]`` in ``frames [*, F]``.

    Products and sums of single coordinates need three numbers per pair instead of nine. They are also exact in
    float32, where a matrix product may run in tf32.
    """
    origin = frames.invert_apply(torch.zeros_like(frames.translation))
    x, y, z = (points[..., None, :, k] for k in range(3))
    return [
        torch.addcmul(
            torch.addcmul(
                torch.addcmul(origin[..., :, None, a], frames.rotation[..., :, 0, a, None], x),
                frames.rotation[..., :, 1, a, None],
                y,
            ),
            frames.rotation[..., :, 2, a, None],
            z,
        )
        for a in range(3)
    ]


def affine_to_rigid(affine: Tensor) -> Rigid:
    """Return rigid transforms ``[*]`` from ``affine [*, 7]`` (unit quaternion, translation in Å)."""
    return Rigid(quaternion_to_rotation(affine[..., :4]), affine[..., 4:])


def backbone_fape(structure: dict[str, Any], batch: dict[str, Tensor], config: ConfigDict) -> Tensor:
    """Return the backbone FAPE ``[layers, *]`` of every structure module layer (Algorithm 20, line 17).

    ``use_clamped_fape [*]`` in the batch, optional, is the weight of the clamped error against the unclamped one
    (section 1.11.5).
    """
    unit = config.fape.loss_unit_distance
    parts = [(unit, config.fape.clamp_distance, None)]
    if "use_clamped_fape" not in batch:
        return _backbone_errors(structure, batch, parts)[0]
    clamped, free = _backbone_errors(structure, batch, [*parts, (unit, None, None)])
    share = batch["use_clamped_fape"]
    return clamped * share + free * (1.0 - share)


def complex_backbone_fape(
    structure: dict[str, Any], batch: dict[str, Tensor], config: ConfigDict
) -> tuple[Tensor, Tensor]:
    """Return the backbone FAPE ``[layers, *]`` of every layer within chains, and between chains.

    Evans et al. 2021 (doi:10.1101/2021.10.04.463034). The error within chains is clamped as in a monomer. The error
    between chains (frames of one chain, points of another) has its own clamp and unit. The nodes ``intra_chain_fape``
    and ``interface_fape`` of the configuration set both.
    """
    chain = batch["asym_id"]
    same = (chain[..., :, None] == chain[..., None, :]).to(batch["backbone_affine_mask"].dtype)
    within, between = _backbone_errors(
        structure,
        batch,
        [
            (node.loss_unit_distance, node.atom_clamp_distance, pairs)
            for node, pairs in ((config.intra_chain_fape, same), (config.interface_fape, 1.0 - same))
        ],
    )
    return within, between


def _backbone_errors(
    structure: dict[str, Any],
    batch: dict[str, Tensor],
    parts: Sequence[tuple[float, float | None, Tensor | None]],
) -> list[Tensor]:
    """Return errors ``[layers, *]`` of the backbone, for each unit, clamp and mask of pairs."""
    trajectory, target = (affine_to_rigid(x) for x in (structure["traj"], batch["backbone_affine_tensor"]))
    mask = batch["backbone_affine_mask"]
    return [
        frame_aligned_point_error(
            trajectory,
            target,
            mask,
            trajectory.translation,
            target.translation,
            mask,
            length_scale=unit,
            clamp_distance=clamp,
            pair_mask=pairs,
        )
        for unit, clamp, pairs in parts
    ]


def sidechain_fape(structure: dict[str, Any], batch: dict[str, Tensor], config: ConfigDict) -> Tensor:
    """Return the last layer's FAPE ``[*]`` of all atoms in all rigid groups' frames (Algorithm 20, line 28).

    ``structure`` holds the renamed ground truth of
    :func:`fastfold.evoformer.losses.side_chains.rename_ground_truth`.
    """
    better = structure["alt_naming_is_better"][..., None, None]
    target = (1.0 - better) * batch["rigidgroups_gt_frames"] + better * batch["rigidgroups_alt_gt_frames"]
    target = target.flatten(-3, -2)
    frames = structure["sidechains"]["frames"]
    predicted = Rigid(frames["rotation"][-1].flatten(-4, -3), frames["translation"][-1].flatten(-3, -2))
    return frame_aligned_point_error(
        predicted,
        Rigid(target[..., :9].unflatten(-1, (3, 3)), target[..., 9:]),
        batch["rigidgroups_gt_exists"].flatten(-2),
        structure["sidechains"]["atom_pos"][-1].flatten(-3, -2),
        structure["renamed_atom14_gt_positions"].flatten(-3, -2),
        structure["renamed_atom14_gt_exists"].flatten(-2),
        length_scale=config.sidechain.get("length_scale") or config.sidechain.loss_unit_distance,
        clamp_distance=config.sidechain.atom_clamp_distance,
    )


def aligned_errors(structure: dict[str, Any], batch: dict[str, Tensor], position_scale: float) -> Tensor:
    """Return squared errors ``[*, N, N]`` in Å² of every residue's CA in every residue's frame, without gradient.

    A residue has no error in its own frame. The lowest bin of the aligned error ends at 0 Å, however, so rounding
    decides the bin. The official program scales positions to Å in a fused multiply-add, which leaves a rounding error:
    the aligned error is above zero unless the product was exact in float32. This function reproduces that.
    """
    with torch.no_grad():
        predicted = affine_to_rigid(structure["final_affines"])
        target = affine_to_rigid(batch["backbone_affine_tensor"])
        seen = predicted[..., None].invert_apply(predicted.translation[..., None, :, :])
        true = target[..., None].invert_apply(target.translation[..., None, :, :])
        errors = (seen - true).square().sum(-1)
        positions = predicted.translation.double()
        exact = ((positions / position_scale).float().double() * position_scale == positions).all(-1)
        residue = torch.where(exact, 0.0, 1e-12).to(errors.dtype)
        return errors + torch.diag_embed(residue)
