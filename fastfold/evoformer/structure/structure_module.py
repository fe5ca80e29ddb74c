"""Structure module: atom positions from representations (supplement Algorithm 20)."""

from __future__ import annotations

from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.evoformer.execution import LazyRows, PolicyModule, current_call, is_training
from fastfold.evoformer.primitives import Init, LayerNorm, Linear, dropout
from fastfold.evoformer.structure.invariant_point_attention import InvariantPointAttention, PairTerms
from fastfold.protein.all_atom import atom14_to_atom37, frames_to_atom14, lookup, torsion_angles_to_frames
from fastfold.protein.metrics.backbone import torsion
from fastfold.protein.rigid import Rigid, quaternion_to_rotation, update_quaternion


class AngleResNet(nn.Module):
    """Torsion angles from the current and the initial single representation (supplement Algorithm 20, lines 11-14).

    - Line 11: both are projected and added.
    - Lines 12-13: residual blocks of two layers.
    - Line 14: seven angles as sine and cosine, which are normalised.
    """

    def __init__(self, config: ConfigDict, c_current: int, c_initial: int, *, zero_init: bool) -> None:
        super().__init__()
        c = config.num_channel
        self.input = Linear(c_current, c)
        self.initial_input = Linear(c_initial, c)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(),
                Linear(c, c, init="relu"),
                nn.ReLU(),
                Linear(c, c, init="final" if zero_init else "default"),
            )
            for _ in range(config.num_residual_block)
        )
        self.angles = Linear(c, 14)

    def forward(self, single: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised and raw (sine, cosine) ``[*, N, 7, 2]``.

        The representations are ``single [*, N, c_current]`` and ``initial [*, N, c_initial]``.
        """
        x = self.input(F.relu(single)) + self.initial_input(F.relu(initial))
        for block in self.blocks:
            x = x + block(x)
        raw = self.angles(F.relu(x)).unflatten(-1, (7, 2))
        return raw / raw.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt(), raw


class StructureModule(PolicyModule):
    """Iterations of one layer with shared weights that move residue frames (supplement Algorithm 20).

    - Lines 1-3: single and pair representation are normalised, and the single one is projected.
    - Line 4: all frames start at the origin.
    - Lines 6-7: invariant point attention (Algorithm 22) updates the single representation; dropout and norm follow.
    - Lines 8-9: a transition updates it; dropout and norm follow.
    - Line 10: each frame is moved by an update projected from it (Algorithm 23).
    - Lines 11-14: torsion angles are predicted (:class:`AngleResNet`) and give the atom positions (Algorithm 24).
    - Line 20: no gradient flows through orientations from one iteration to the next.

    Computes in the precision of its parameters, by default float32 as in AlphaFold, also if the trunk runs in less.

    Attributes:
        stop_rotation_gradient: True for line 20, as AlphaFold trains. False for gradients with respect to inputs, as
            design needs them; with line 20 they disagree with finite differences.
    """

    operator = "structure module"

    def __init__(self, config: ConfigDict, c_s: int, c_z: int, *, multimer: bool, zero_init: bool) -> None:
        super().__init__()
        c = config.num_channel
        self.layers, self.position_scale, self.dropout_rate = (
            config.num_layer,
            config.position_scale,
            config.dropout,
        )
        self.stop_rotation_gradient = True
        final: Init = "final" if zero_init else "default"
        self.single_norm = LayerNorm(c_s)
        self.pair_norm = LayerNorm(c_z)
        self.initial = Linear(c_s, c)
        self.attention = InvariantPointAttention(config, c, c_z, multimer=multimer, zero_init=zero_init)
        self.attention_norm = LayerNorm(c)
        depth = config.num_layer_in_transition
        self.transition = nn.ModuleList(
            Linear(c, c, init="relu" if i < depth - 1 else final) for i in range(depth)
        )
        self.transition_norm = LayerNorm(c)
        self.backbone_update = Linear(c, 6, init=final)
        self.angles = AngleResNet(config.sidechain, c, c_s, zero_init=zero_init)

    def forward(self, single: Tensor, pair: Tensor, aatype: Tensor, seq_mask: Tensor) -> dict[str, Any]:
        """Predict the structure from ``single [*, N, c_s]`` and ``pair [*, N, N, c_z]``.

        The residue types are ``[*, N]``, and ``seq_mask [*, N]`` is 0 for padding.

        Returns:
            AlphaFold's ``structure_module`` results: ``final_atom_positions [*, N, 37, 3]`` and
            ``final_atom14_positions`` in Å, their masks, ``final_affines [*, N, 7]`` (quaternion, Å), ``traj``
            ``[layers, *, N, 7]``, ``sidechains`` (``frames``: ``rotation [layers, *, N, 8, 3, 3]`` and
            ``translation [layers, *, N, 8, 3]`` in Å,
            ``atom_pos [layers, *, N, 14, 3]``, ``angles_sin_cos`` and ``unnormalized_angles_sin_cos``
            ``[layers, *, N, 7, 2]``), and ``act [*, N, c]``, the final single representation.
        """
        dtype = self.initial.weight.dtype
        initial = self.single_norm(single.to(dtype))

        def normed(rows: slice) -> Tensor:
            return self.pair_norm(pair[..., rows, :, :].to(dtype))

        # In blocks, the pair is normalised again by each layer, so that no second pair tensor is held.
        normed_pair: LazyRows | PairTerms = LazyRows(normed, tuple(pair.shape), self.policy)
        mask, policy = seq_mask.to(dtype), self.policy
        in_one_block = policy.block_elements is None or pair.numel() <= policy.block_elements
        if in_one_block and not (policy.recompute and torch.is_grad_enabled()):
            normed_pair = self.attention.pair_terms(normed(slice(None)), mask)
        x = self.initial(initial)
        quaternion = torch.zeros(*x.shape[:-1], 4, dtype=dtype, device=x.device)
        quaternion[..., 0] = 1.0
        rotation, translation = quaternion_to_rotation(quaternion), torch.zeros_like(quaternion[..., :3])
        steps: list[tuple[Tensor, ...]] = []
        training, call = is_training(self), current_call()
        stops = self.stop_rotation_gradient if call is None else call.stop_rotation_gradient
        for layer in range(self.layers):
            x = x + self.attention(x, normed_pair, Rigid(rotation, translation), mask)
            x = self.attention_norm(dropout(x, self.dropout_rate, training=training))
            hidden = x
            for i, linear in enumerate(self.transition):
                hidden = linear(hidden if i == 0 else F.relu(hidden))
            x = self.transition_norm(dropout(x + hidden, self.dropout_rate, training=training))

            rotate, move = self.backbone_update(x).split(3, dim=-1)
            quaternion = update_quaternion(quaternion, rotate)
            translation = translation + (rotation * move.unsqueeze(-2)).sum(-1)
            rotation = quaternion_to_rotation(quaternion)
            steps.append((x, quaternion, rotation, translation))
            if layer < self.layers - 1 and stops:  # Algorithm 20, line 20
                quaternion, rotation = quaternion.detach(), rotation.detach()
        # Lines 11-14 of all iterations at once, which no later iteration reads.
        single, quaternion, rotation, translation = map(torch.stack, zip(*steps, strict=True))
        angles, raw_angles = self.angles(single, initial)
        backbone = Rigid(rotation, translation * self.position_scale)
        affines = torch.cat([quaternion, backbone.translation], -1)
        types = aatype.expand(quaternion.shape[:-1])
        frames = torsion_angles_to_frames(types, backbone, angles)
        atom_positions = frames_to_atom14(types, frames)
        atom14, present = atom_positions[-1], mask[..., None]
        return {
            "act": x,
            "traj": affines,
            "final_affines": affines[-1],
            "sidechains": {
                "frames": {"rotation": frames.rotation, "translation": frames.translation},
                "atom_pos": atom_positions,
                "angles_sin_cos": angles,
                "unnormalized_angles_sin_cos": raw_angles,
            },
            "final_atom14_positions": atom14,
            "final_atom14_mask": lookup("restype_atom14_mask", aatype, atom14) * present,
            "final_atom_positions": atom14_to_atom37(atom14, aatype),
            "final_atom_mask": lookup("restype_atom37_mask", aatype, atom14) * present,
        }

    def moved(
        self, structure: dict[str, Any], affines: Tensor, aatype: Tensor, bonded: Tensor
    ) -> dict[str, Any]:
        """Return a structure with other frames and the same torsion angles of side chains.

        Args:
            structure: Of :meth:`forward`; its iterations stay as they are.
            affines: Quaternions and CA positions in Å, ``[*, N, 7]``.
            aatype: ``[*, N]``.
            bonded: ``[*, N - 1]``, True where a residue and the next are neighbours in a chain. O is opposite to the N
                of a neighbour; other residues keep their angle psi.
        """
        backbone = Rigid(quaternion_to_rotation(affines[..., :4]), affines[..., 4:])
        angles = structure["sidechains"]["angles_sin_cos"][-1]
        points = lookup("restype_atom14_rigid_group_positions", aatype, affines)[..., :3, :]
        n, ca, c = backbone[..., None].apply(points).unbind(-2)
        psi = torch.deg2rad(torsion(n[..., :-1, :], ca[..., :-1, :], c[..., :-1, :], n[..., 1:, :]))
        own = torch.stack([psi.sin(), psi.cos()], -1)
        angles = angles.clone()
        angles[..., :-1, 2, :] = torch.where(bonded[..., None], own, angles[..., :-1, 2, :])
        atom14 = frames_to_atom14(aatype, torsion_angles_to_frames(aatype, backbone, angles))
        return structure | {
            "final_affines": affines,
            "final_atom14_positions": atom14,
            "final_atom_positions": atom14_to_atom37(atom14, aatype),
        }
