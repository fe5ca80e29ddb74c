"""Templates of the monomer network: pair embedding, point-wise attention, torsion rows (Algorithms 2, 16, 17)."""

from __future__ import annotations

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.errors import ConfigError
from fastfold.evoformer.attention import Attention
from fastfold.evoformer.embedders.input import distogram_bins
from fastfold.evoformer.evoformer import TemplatePairStack
from fastfold.evoformer.execution import (
    Block,
    PairRows,
    PolicyModule,
    check_part,
    is_training,
    random_state,
    set_random_state,
)
from fastfold.evoformer.primitives import LayerNorm, Linear
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import atom37_to_torsion_angles
from fastfold.protein.rigid import Rigid
from fastfold.utils.device import reads_are_free


def shown_templates(template_mask: Tensor) -> tuple[int, ...]:
    """Return the indices of the templates that ``template_mask [*, T]`` keeps.

    The other templates have a weight of exactly zero.
    """
    present = template_mask.reshape(-1, template_mask.shape[-1]).any(0).tolist()
    return tuple(t for t, is_shown in enumerate(present) if is_shown)


def outer(mask: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return the outer product ``[*, rows, N]`` of ``mask [*, N]`` with itself."""
    return mask[..., rows, None] * mask[..., None, :]


def distance_one_hot(positions: Tensor, config: ConfigDict, rows: slice) -> Tensor:
    """Return one-hot distance bins ``[*, rows, N, num_bins]`` of ``positions [*, N, 3]`` in Å."""
    bins = distogram_bins(positions, config, rows)
    return F.one_hot(bins, config.num_bins + 1)[..., 1:].to(positions.dtype)


def backbone_mask(mask: Tensor) -> Tensor:
    """Return 1 for residues ``[*, N]`` that have N, CA and C, from the atom37 mask ``[*, N, 37]``."""
    n, ca, c = (mask[..., rc.atom_order[name]] for name in ("N", "CA", "C"))
    return n * ca * c


def backbone_vectors(positions: Tensor, rows: slice) -> Tensor:
    """Return the CA position of every residue in the backbone frames of ``rows``, ``[*, rows, N, 3]`` in Å.

    The positions are ``[*, N, 37, 3]`` in Å.
    """
    n, ca, c = (positions[..., rc.atom_order[name], :] for name in ("N", "CA", "C"))
    # The official frame has C on its x axis and N in the x-y plane.
    frames = Rigid.from_three_points(2 * ca - c, ca, n)[..., rows, None]
    return frames.invert_apply(ca[..., None, :, :])


class TemplateEmbedder(PolicyModule):
    """Pair update from templates (supplement Algorithm 2, lines 9-13).

    - Line 9: each template's pair features are projected.
    - Lines 10-12: each template runs through the template pair stack alone (Algorithm 16), and is normalised.
    - Line 13: each pair of residues attends to its embeddings in all templates, and the result is added. Algorithm 17:
      queries come from the pair (line 1), keys and values from the templates (line 2), softmax and sum go over the
      templates (lines 3-4), and all heads together are projected (line 5).
    """

    operator = "templates"

    def __init__(self, config: ConfigDict, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        if config.attention.gating:
            raise ConfigError("expected template.attention.gating: false, found true")
        self.config = config
        stack = config.template_pair_stack
        c_t = stack.triangle_attention_ending_node.value_dim
        self.embedding = Linear(config.dgram_features.num_bins + 49, c_t, init="relu")
        self.stack = TemplatePairStack(stack, c_t, attention_first=True, zero_init=zero_init)
        self.norm = LayerNorm(c_t)
        self.attention = Attention(
            c_z,
            c_t,
            c_z,
            heads=config.attention.num_head,
            c_hidden=config.attention.value_dim,
            gating=False,
            zero_init=zero_init,
        )

    def forward(
        self, pair: Tensor, features: dict[str, Tensor], pair_mask: Tensor, first_row: int = 0
    ) -> Tensor:
        """Return the updated ``pair [*, rows, N, c_z]``.

        Args:
            pair: Pair representation, all rows or a part of them.
            features: AlphaFold's ``template_*`` keys with a template axis ``T`` before the residues.
            pair_mask: ``[*, N, N]``.
            first_row: Residue of the first row.
        """
        template_mask = features["template_mask"].to(pair.dtype)
        shown = tuple(range(template_mask.shape[-1]))
        if self.policy.templates is not None:
            shown = self.policy.templates
        elif not torch.is_grad_enabled() and (not is_training(self) or reads_are_free(template_mask.device)):
            # Reading the mask would make a training step on a GPU wait.
            shown = shown_templates(template_mask)
        if not shown:
            return pair
        target = self.policy.pair_rows(pair)
        del pair

        def embed(t: int) -> Tensor:
            one = {
                "aatype": features["template_aatype"][..., t, :],
                "beta": features["template_pseudo_beta"][..., t, :, :],
                "beta_mask": features["template_pseudo_beta_mask"][..., t, :],
                "positions": features["template_all_atom_positions"][..., t, :, :, :],
                "mask": features["template_all_atom_masks"][..., t, :, :],
            }
            return self._embed(one, target.pair, pair_mask, first_row)

        # The attention weights need the unchanged pair and all templates. Only then may templates update the pair.
        is_held = self.policy.hold_templates or torch.is_grad_enabled() or len(shown) == 1
        start = None if is_held or not is_training(self) else random_state(template_mask.device)
        held: dict[int, Tensor] = {}
        logits = []
        scores: Tensor | None = None
        if not torch.is_grad_enabled():
            size = (*target.pair.shape[:-1], self.attention.heads, len(shown))
            scores = target.pair.new_empty(size, dtype=self._logits_dtype(target))
        for place, t in enumerate(shown):
            template = embed(t)
            logits.append(self._logits(target, template, None if scores is None else scores[..., place]))
            if is_held:
                held[t] = template
            del template
        # Indexing by a list would copy the list to the device.
        hidden = torch.stack([template_mask[..., t] == 0 for t in shown], -1)[..., None, None, None, :]

        def softmax(rows: Tensor, _: slice) -> Tensor:
            return torch.softmax(rows.masked_fill(hidden, -1e9), -1)

        weights = torch.stack(logits, -1) if scores is None else scores
        del logits
        weights = self.policy.map(weights, softmax, dim=-4, consume=True)
        any_template = (template_mask.sum(-1) > 0).to(target.pair.dtype)[..., None, None, None]
        if start is not None:  # templates are embedded again in the same order, with the same dropout
            set_random_state(start, template_mask.device)
        for place, t in enumerate(shown):
            template = held.pop(t) if t in held else embed(t)
            bias = self.attention.output.bias if place == 0 else None
            self._add(target, template, weights[..., place], any_template, bias)
            del template
        del scores, weights
        return target.restore()

    def _logits_dtype(self, target: PairRows) -> torch.dtype:
        return torch.promote_types(target.pair.dtype, torch.float32)

    def _logits(self, target: PairRows, template: Tensor, out: Tensor | None) -> Tensor:
        """Return attention logits ``[*, rows, N, H]`` for ``template [*, rows, N, c_t]``, at least float32."""
        dtype, read = self._logits_dtype(target), target.reader()

        def logits_of(_: Tensor, rows: slice) -> Tensor:
            split = (self.attention.heads, -1)
            q = self.attention.query(read(rows)).unflatten(-1, split).to(dtype)
            k = self.attention.key(template[..., rows, :, :]).unflatten(-1, split).to(dtype)
            return (q * k).sum(-1) * q.shape[-1] ** -0.5

        return self.policy.map(target.pair, logits_of, dim=-3, out=out)

    def _add(
        self, target: PairRows, template: Tensor, weights: Tensor, any_template: Tensor, bias: Tensor | None
    ) -> None:
        """Add one template's part of the attention to the pair, and the bias if given."""
        check_part(self.attention.output, f"attention.output of {type(self).__name__}")

        def add_attended(block: Block) -> Tensor:
            rows = block.rows
            value = self.attention.value(template[..., rows, :, :]).unflatten(-1, (self.attention.heads, -1))
            attended = (value * weights[..., rows, :, :].unsqueeze(-1).to(value.dtype)).flatten(-2)
            return target.add(block, F.linear(attended, self.attention.output.weight, bias) * any_template)

        target.pair = self.apply_residual(target.pair, add_attended, dim=-3)

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
        embedded = self.stack(embedded, pair_mask)
        return self.policy.map(embedded, lambda rows, _: self.norm(rows), dim=-3, consume=True)


class TemplateTorsionEmbedder(nn.Module):
    """MSA rows from the templates' torsion angles (supplement Algorithm 2, lines 7-8).

    - Line 7: residue types, angles and their masks run through two linear layers with a ReLU between them.
    - Line 8: the network appends the result to the MSA.
    """

    def __init__(self, c_m: int, *, placeholder_for_undefined: bool) -> None:
        super().__init__()
        self.placeholder_for_undefined = placeholder_for_undefined
        self.single = Linear(57, c_m, init="relu")
        self.projection = Linear(c_m, c_m, init="relu")

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rows ``[*, T, N, c_m]`` and their mask ``[*, T, N]`` from AlphaFold's ``template_*`` keys."""
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
        # Psi needs only its own residue's backbone, so its mask is 1 where the template has the residue.
        return self.projection(F.relu(self.single(inputs))), mask[..., 2]
