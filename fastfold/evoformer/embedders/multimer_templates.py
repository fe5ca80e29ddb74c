"""Templates of the multimer network (AlphaFold-Multimer, section 7.2)."""

from __future__ import annotations

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.evoformer.compat.xla_rounding import own_frame_direction
from fastfold.evoformer.embedders.templates import (
    backbone_mask,
    backbone_vectors,
    distance_one_hot,
    outer,
)
from fastfold.evoformer.evoformer import TemplatePairStack
from fastfold.evoformer.execution import Block, PairRows, PolicyModule
from fastfold.evoformer.primitives import LayerNorm, Linear
from fastfold.protein.all_atom import chi_angles, pseudo_beta, pseudo_beta_mask


class MultimerTemplateEmbedder(PolicyModule):
    """Pair update from templates (AlphaFold-Multimer, section 7.2).

    - Distances, masks, residue types and directions of each template are projected separately and added.
    - The query's pair is normalised, projected and added.
    - The template pair stack updates each template's pair (Algorithm 16), which is then normalised.
    - The mean over the templates is projected and added to the query's pair.
    """

    operator = "templates"

    def __init__(self, config: ConfigDict, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.dgram = config.dgram_features
        c_t, stack = config.num_channels, config.template_pair_stack
        self.query_norm = LayerNorm(c_z)
        self.distance = Linear(self.dgram.num_bins, c_t, init="relu")
        self.beta_mask = Linear(1, c_t, init="relu")
        self.aatype_column = Linear(22, c_t, init="relu")
        self.aatype_row = Linear(22, c_t, init="relu")
        self.unit_vector = nn.ModuleList(Linear(1, c_t, init="relu") for _ in range(3))
        self.backbone_mask = Linear(1, c_t, init="relu")
        self.query = Linear(c_z, c_t, init="relu")
        self.stack = TemplatePairStack(stack, c_t, attention_first=False, zero_init=zero_init)
        self.norm = LayerNorm(c_t)
        self.output = Linear(c_t, c_z, init="relu")

    def forward(
        self, pair: Tensor, features: dict[str, Tensor], pair_mask: Tensor, first_row: int = 0
    ) -> Tensor:
        """Return the updated ``pair [*, rows, N, c_z]``.

        Args:
            pair: Pair representation, all rows or a part of them.
            features: ``template_aatype [*, T, N]``, ``template_all_atom_positions [*, T, N, 37, 3]`` (Å),
                ``template_all_atom_mask [*, T, N, 37]`` and ``asym_id [*, N]``: templates are of single chains,
                so only pairs within a chain are used. The optional integers ``template_frame [*, T, N]`` replace
                ``asym_id``: pairs with equal numbers are used, also of different chains.
            pair_mask: ``[*, N, N]``.
            first_row: Residue of the first row.
        """
        frames = features.get("template_frame")
        count = features["template_aatype"].shape[-2]
        total: Tensor | None = None
        target = self.policy.pair_rows(pair)
        del pair
        for t in range(count):
            embedded = self._embed(
                features["template_aatype"][..., t, :],
                features["template_all_atom_positions"][..., t, :, :, :],
                features["template_all_atom_mask"][..., t, :, :],
                features["asym_id"] if frames is None else frames[..., t, :],
                target,
                pair_mask,
                first_row,
            )
            total = embedded if total is None else self._sum(total, embedded)
            del embedded
        assert total is not None, "the multimer network needs at least one (possibly empty) template"

        self._add(target, total, count)
        del total
        return target.restore()

    def _add(self, target: PairRows, total: Tensor, count: int) -> None:
        """Add the mean of all templates to the pair."""

        def add_mean(block: Block) -> Tensor:
            return target.add(block, self.output(F.relu(total[..., block.rows, :, :] / count)))

        target.pair = self.apply_residual(target.pair, add_mean, dim=-3)

    def _sum(self, total: Tensor, embedded: Tensor) -> Tensor:
        """Return the sum, written into ``total`` if the policy works in place."""
        return self.apply_residual(total, lambda block: block.add(embedded[..., block.rows, :, :]), dim=-3)

    def _embed(
        self,
        aatype: Tensor,
        positions: Tensor,
        mask: Tensor,
        frame: Tensor,
        target: PairRows,
        pair_mask: Tensor,
        first_row: int,
    ) -> Tensor:
        dtype, read = target.pair.dtype, target.reader()
        one_hot = F.one_hot(aatype.long(), 22).to(dtype)
        beta, has_beta = pseudo_beta(aatype, positions), pseudo_beta_mask(aatype, mask)
        has_backbone = backbone_mask(mask)
        column, row = self.aatype_column(one_hot), self.aatype_row(one_hot)
        own = own_frame_direction(positions).to(positions.dtype)

        def embed_rows(_: Tensor, rows: slice) -> Tensor:
            same_frame = frame[..., rows, None] == frame[..., None, :]
            beta_pair = (outer(has_beta, rows) * same_frame).unsqueeze(-1)
            backbone_pair = (outer(has_backbone, rows) * same_frame).unsqueeze(-1)
            distances = distance_one_hot(beta, self.dgram, rows) * beta_pair
            vectors = backbone_vectors(positions, rows)
            vectors = vectors / vectors.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
            # The diagonal of this block of rows.
            vectors.diagonal(rows.start, -3, -2).copy_(own[..., rows, :].transpose(-1, -2))
            vectors = vectors * backbone_pair
            total = self.distance(distances.to(dtype)) + self.beta_mask(beta_pair.to(dtype))
            total = total + column[..., None, :, :] + row[..., rows, None, :]
            for axis, linear in enumerate(self.unit_vector):
                total = total + linear(vectors[..., axis : axis + 1].to(dtype))
            total = total + self.backbone_mask(backbone_pair.to(dtype))
            query = read(slice(rows.start - first_row, rows.stop - first_row))
            return total + self.query(self.query_norm(query))

        embedded = self.policy.map(target.pair, embed_rows, dim=-3, start=first_row)
        embedded = self.stack(embedded, pair_mask)
        return self.policy.map(embedded, lambda rows, _: self.norm(rows), dim=-3, consume=True)


class MultimerTemplateTorsionEmbedder(nn.Module):
    """MSA rows from the templates' side-chain angles (AlphaFold-Multimer, section 7.2)."""

    def __init__(self, c_m: int) -> None:
        super().__init__()
        self.single = Linear(34, c_m, init="relu")
        self.projection = Linear(c_m, c_m, init="relu")

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rows ``[*, T, N, c_m]`` and their mask ``[*, T, N]`` from the ``template_*`` keys."""
        aatype = features["template_aatype"]
        chi, mask = chi_angles(
            aatype, features["template_all_atom_positions"], features["template_all_atom_mask"]
        )
        one_hot = F.one_hot(aatype.long(), 22).to(mask.dtype)
        inputs = torch.cat([one_hot, chi.sin() * mask, chi.cos() * mask, mask], -1)
        rows = self.projection(F.relu(self.single(inputs.to(self.single.weight.dtype))))
        return rows, mask[..., 0]
