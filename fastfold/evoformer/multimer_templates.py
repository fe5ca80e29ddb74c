"""Templates of the multimer network (AlphaFold-Multimer, section 7.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.evoformer.evoformer import BlockStack, TemplatePairBlock
from fastfold.evoformer.execution import Executed, add_update
from fastfold.evoformer.primitives import LayerNorm, Linear
from fastfold.evoformer.templates import backbone_mask, backbone_vectors, distance_one_hot, outer, updated
from fastfold.evoformer.xla_rounding import own_frame_direction
from fastfold.memory.offload import OffloadedRows
from fastfold.protein.all_atom import chi_angles, pseudo_beta, pseudo_beta_mask


class MultimerTemplateEmbedder(Executed):
    """Pair update from templates: each is embedded with the query's pair, then all are averaged.

    Args:
        config: Official multimer ``template`` config node.
        c_z: Pair channels.
        zero_init: Initialise the last layer of each update with zeros.
    """

    operator = "templates"

    def __init__(self, config: Any, c_z: int, *, zero_init: bool) -> None:
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
        self.stack = BlockStack(
            [
                TemplatePairBlock(stack, c_t, attention_first=False, zero_init=zero_init)
                for _ in range(stack.num_block)
            ]
        )
        self.norm = LayerNorm(c_t)
        self.output = Linear(c_t, c_z, init="relu")

    def forward(
        self, pair: Tensor, features: dict[str, Tensor], pair_mask: Tensor, first_row: int = 0
    ) -> Tensor:
        """Updated ``pair [*, rows, N, c_z]``.

        Args:
            pair: Pair representation, all rows or a part of them.
            features: ``template_aatype [*, T, N]``, ``template_all_atom_positions [*, T, N, 37, 3]`` (Å),
                ``template_all_atom_mask [*, T, N, 37]`` and ``asym_id [*, N]``: templates are of single chains,
                so only pairs within a chain are used.
            pair_mask: ``[*, N, N]``.
            first_row: The residue of the first row.
        """
        asym_id = features["asym_id"]
        count = features["template_aatype"].shape[-2]
        total: Tensor | None = None
        waiting = self.policy.offloaded(pair)
        pair = pair if waiting is None else waiting.placeholder
        for t in range(count):
            embedded = self._embed(
                features["template_aatype"][..., t, :],
                features["template_all_atom_positions"][..., t, :, :, :],
                features["template_all_atom_mask"][..., t, :, :],
                asym_id,
                pair,
                waiting,
                pair_mask,
                first_row,
            )
            total = embedded if total is None else self._sum(total, embedded)
            del embedded
        assert total is not None, "the multimer network needs at least one (possibly empty) template"

        pair = self._add(pair, total, count, waiting)
        del total
        return pair if waiting is None else waiting.restore()

    def _add(self, pair: Tensor, total: Tensor, count: int, waiting: OffloadedRows | None) -> Tensor:
        """The pair with the mean of all templates added."""

        def branch(rows: Tensor, index: slice, _: Tensor | None, out: Tensor | None) -> Tensor:
            return updated(rows, self.output(F.relu(total[..., index, :, :] / count)), out, waiting, index)

        return self.policy.residual(pair, branch, dim=-3)

    def _sum(self, total: Tensor, embedded: Tensor) -> Tensor:
        """The sum of both, in the memory of the first where that is allowed."""
        return self.policy.residual(
            total, lambda rows, index, _, out: add_update(rows, embedded[..., index, :, :], out), dim=-3
        )

    def _embed(
        self,
        aatype: Tensor,
        positions: Tensor,
        mask: Tensor,
        asym_id: Tensor,
        pair: Tensor,
        waiting: OffloadedRows | None,
        pair_mask: Tensor,
        first_row: int,
    ) -> Tensor:
        one_hot = F.one_hot(aatype.long(), 22).to(pair.dtype)
        beta, has_beta = pseudo_beta(aatype, positions), pseudo_beta_mask(aatype, mask)
        has_backbone = backbone_mask(mask)
        column, row = self.aatype_column(one_hot), self.aatype_row(one_hot)
        own = own_frame_direction(positions).to(positions.dtype)

        def embed_rows(query: Tensor, rows: slice) -> Tensor:
            same_chain = asym_id[..., rows, None] == asym_id[..., None, :]
            beta_pair = (outer(has_beta, rows) * same_chain).unsqueeze(-1)
            backbone_pair = (outer(has_backbone, rows) * same_chain).unsqueeze(-1)
            distances = distance_one_hot(beta, self.dgram, rows) * beta_pair
            vectors = backbone_vectors(positions, rows)
            vectors = vectors / vectors.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
            # The diagonal of this block of rows.
            vectors.diagonal(rows.start, -3, -2).copy_(own[..., rows, :].transpose(-1, -2))
            vectors = vectors * backbone_pair
            total = self.distance(distances.to(pair.dtype)) + self.beta_mask(beta_pair.to(pair.dtype))
            total = total + column[..., None, :, :] + row[..., rows, None, :]
            for axis, linear in enumerate(self.unit_vector):
                total = total + linear(vectors[..., axis : axis + 1].to(pair.dtype))
            total = total + self.backbone_mask(backbone_pair.to(pair.dtype))
            if waiting is not None:
                query = waiting.rows(slice(rows.start - first_row, rows.stop - first_row))
            return total + self.query(self.query_norm(query))

        embedded = self.policy.map(pair, embed_rows, dim=-3, start=first_row)
        embedded = self.stack(embedded, pair_mask)
        return self.policy.map(embedded, lambda rows, _: self.norm(rows), dim=-3, consume=True)


class MultimerTemplateTorsionEmbedder(nn.Module):
    """Rows for the MSA from the templates' side-chain angles (AlphaFold-Multimer, section 7.2).

    Args:
        c_m: MSA channels.
    """

    def __init__(self, c_m: int) -> None:
        super().__init__()
        self.single = Linear(34, c_m, init="relu")
        self.projection = Linear(c_m, c_m, init="relu")

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Rows ``[*, T, N, c_m]`` and their mask ``[*, T, N]`` from the ``template_*`` keys."""
        aatype = features["template_aatype"]
        chi, mask = chi_angles(
            aatype, features["template_all_atom_positions"], features["template_all_atom_mask"]
        )
        one_hot = F.one_hot(aatype.long(), 22).to(mask.dtype)
        inputs = torch.cat([one_hot, chi.sin() * mask, chi.cos() * mask, mask], -1)
        rows = self.projection(F.relu(self.single(inputs.to(self.single.weight.dtype))))
        return rows, mask[..., 0]
