"""Templates of the monomer network: pair embedding, point-wise attention, torsion rows (Algorithms 2, 16, 17)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.evoformer.attention import Attention
from fastfold.evoformer.embedders import distogram_bins
from fastfold.evoformer.evoformer import BlockStack, TemplatePairBlock
from fastfold.evoformer.execution import Executed, add_update
from fastfold.evoformer.primitives import LayerNorm, Linear
from fastfold.protein import residue_constants as rc
from fastfold.protein.rigid import Rigid
from fastfold.protein.torsions import atom37_to_torsion_angles


def outer(mask: Tensor, rows: slice = slice(None)) -> Tensor:
    """``mask [*, N]`` with itself: ``[*, rows, N]``."""
    return mask[..., rows, None] * mask[..., None, :]


def distance_one_hot(positions: Tensor, config: Any, rows: slice) -> Tensor:
    """One-hot distance bins ``[*, rows, N, num_bins]`` of ``positions [*, N, 3]`` in Å."""
    bins = distogram_bins(positions, config, rows)
    return F.one_hot(bins, config.num_bins + 1)[..., 1:].to(positions.dtype)


def backbone_mask(mask: Tensor) -> Tensor:
    """Residues ``[*, N]`` whose N, CA and C all exist, from the atom37 mask ``[*, N, 37]``."""
    n, ca, c = (mask[..., rc.atom_order[name]] for name in ("N", "CA", "C"))
    return n * ca * c


def backbone_vectors(positions: Tensor, rows: slice) -> Tensor:
    """Every residue's CA in every other residue's backbone frame.

    Args:
        positions: ``[*, N, 37, 3]`` in Å.
        rows: Residues whose frames are wanted.

    Returns:
        ``[*, rows, N, 3]`` in Å.
    """
    n, ca, c = (positions[..., rc.atom_order[name], :] for name in ("N", "CA", "C"))
    # The official frame has C on its x axis and N in the x-y plane.
    frames = Rigid.from_three_points(2 * ca - c, ca, n)[..., rows, None]
    return frames.invert_apply(ca[..., None, :, :])


class TemplateEmbedder(Executed):
    """Pair update from templates: embed each, then attend from the query (Algorithm 2 lines 9-12, 16, 17).

    Args:
        config: Official ``template`` config node.
        c_z: Pair channels.
        zero_init: Initialise the last layer of each update with zeros.
    """

    def __init__(self, config: Any, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.config = config
        stack = config.template_pair_stack
        c_t = stack.triangle_attention_ending_node.value_dim
        self.embedding = Linear(config.dgram_features.num_bins + 49, c_t, init="relu")
        self.stack = BlockStack(
            [
                TemplatePairBlock(stack, c_t, attention_first=True, zero_init=zero_init)
                for _ in range(stack.num_block)
            ]
        )
        self.norm = LayerNorm(c_t)
        self.attention = Attention(
            c_z,
            c_t,
            c_z,
            heads=config.attention.num_head,
            c_hidden=config.attention.value_dim,
            gating=config.attention.gating,
            zero_init=zero_init,
        )

    def forward(
        self, pair: Tensor, features: dict[str, Tensor], pair_mask: Tensor, first_row: int = 0
    ) -> Tensor:
        """Updated ``pair [*, rows, N, c_z]``.

        Args:
            pair: Pair representation, all rows or a part of them.
            features: AlphaFold's ``template_*`` keys with a template axis ``T`` before the residues.
            pair_mask: ``[*, N, N]``.
            first_row: The residue of the first row.
        """
        template_mask = features["template_mask"].to(pair.dtype)
        embedded = []
        for t in range(template_mask.shape[-1]):
            one = {
                "aatype": features["template_aatype"][..., t, :],
                "beta": features["template_pseudo_beta"][..., t, :, :],
                "beta_mask": features["template_pseudo_beta_mask"][..., t, :],
                "positions": features["template_all_atom_positions"][..., t, :, :, :],
                "mask": features["template_all_atom_masks"][..., t, :, :],
            }
            embedded.append(self._embed(one, pair, pair_mask, first_row))
        templates = torch.stack(embedded, dim=-2)  # [*, N, N, T, c_t]
        any_template = (template_mask.sum(-1) > 0).to(pair.dtype)[..., None, None, None]

        def branch(rows: Tensor, index: slice, _: Tensor | None, out: Tensor | None) -> Tensor:
            keys = templates[..., index, :, :, :]
            mask = template_mask[..., None, None, :].expand(*rows.shape[:-1], -1)
            update = self.attention(rows.unsqueeze(-2), keys, None, mask).squeeze(-2)
            return add_update(rows, update * any_template, out)

        return self.policy.residual(pair, branch, dim=-3)

    def _embed(self, template: dict[str, Tensor], pair: Tensor, pair_mask: Tensor, first_row: int) -> Tensor:
        aatype = F.one_hot(template["aatype"].long(), 22).to(pair.dtype)
        residues = aatype.shape[-2]
        backbone = backbone_mask(template["mask"])

        def features_of(rows: slice) -> Tensor:
            bins = distance_one_hot(template["beta"], self.config.dgram_features, rows).to(pair.dtype)
            both = outer(backbone, rows).unsqueeze(-1).to(pair.dtype)
            vectors = torch.zeros_like(bins[..., :3])
            if self.config.use_template_unit_vector:
                vectors = backbone_vectors(template["positions"], rows)
                vectors = vectors / (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                vectors = vectors.to(pair.dtype) * both
            count = bins.shape[-3]
            parts = [
                bins,
                outer(template["beta_mask"], rows).unsqueeze(-1).to(pair.dtype),
                aatype.unsqueeze(-3).expand(*aatype.shape[:-2], count, residues, 22),
                aatype[..., rows, None, :].expand(*aatype.shape[:-2], count, residues, 22),
                vectors,
                both,
            ]
            return torch.cat(parts, -1) * both

        embedded = self.policy.map(
            pair, lambda _, rows: self.embedding(features_of(rows)), dim=-3, start=first_row
        )
        return self.norm(self.stack(embedded, pair_mask))


class TemplateTorsionEmbedder(nn.Module):
    """Rows for the MSA from the templates' torsion angles (Algorithm 2, lines 7-8).

    Args:
        c_m: MSA channels.
        placeholder_for_undefined: See :func:`fastfold.protein.torsions.atom37_to_torsion_angles`.
    """

    def __init__(self, c_m: int, *, placeholder_for_undefined: bool) -> None:
        super().__init__()
        self.placeholder_for_undefined = placeholder_for_undefined
        self.single = Linear(57, c_m, init="relu")
        self.projection = Linear(c_m, c_m, init="relu")

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Rows ``[*, T, N, c_m]`` and their mask ``[*, T, N]`` from AlphaFold's ``template_*`` keys."""
        aatype = features["template_aatype"]
        torsions = atom37_to_torsion_angles(
            aatype,
            features["template_all_atom_positions"],
            features["template_all_atom_masks"],
            placeholder_for_undefined=self.placeholder_for_undefined,
        )
        mask = torsions["torsion_angles_mask"]
        inputs = torch.cat(
            [
                F.one_hot(aatype.long(), 22).to(mask.dtype),
                torsions["torsion_angles_sin_cos"].flatten(-2),
                torsions["alt_torsion_angles_sin_cos"].flatten(-2),
                mask,
            ],
            -1,
        ).to(self.single.weight.dtype)
        # Psi depends on one residue's backbone alone, so its mask says whether the residue is there.
        return self.projection(F.relu(self.single(inputs))), mask[..., 2]
