"""What surrounds the blocks, on shards: embedding, recycling, structure module, heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.evoformer.embedders import extra_msa_features
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.invariant_point_attention import InvariantPointAttention
from fastfold.evoformer.model import AlphaFold, Features, FeatureSource, OnCycle
from fastfold.parallel.axial import AxialShards
from fastfold.parallel.collectives import broadcast, exchange_sizes, gather
from fastfold.protein.rigid import Rigid

_EXTRA_MSA = ("extra_msa", "extra_has_deletion", "extra_deletion_value")


class AxialInvariantPointAttention(InvariantPointAttention):
    """Updates of this rank's residues, from its rows of the pair, gathered."""

    shards: AxialShards

    def forward(
        self, single: Tensor, pair: Tensor, frames: Rigid, mask: Tensor, rows: slice = slice(None)
    ) -> Tensor:
        """Update ``[*, N, c_s]`` from a shard ``pair [*, n, N, c_z]``; everything else is whole."""
        residues = single.shape[-2]
        update = super().forward(single, pair, frames, mask, self.shards.own(residues))
        return self.shards.gather(update, -2, residues)


class AxialDistogramHead(DistogramHead):
    """Logits of this rank's rows; what is mirrored at the diagonal comes from the other ranks."""

    shards: AxialShards

    def transposed(self, half: Tensor) -> Tensor:
        """Rows ``[*, n, N, bins]`` of the transposed tensor, from its rows."""
        columns = self.shards.switch(half, cut=-2, join=-3, length=half.shape[-2])
        return columns.transpose(-2, -3)


class AxialAlphaFold(AlphaFold):
    """The network on shards: sequences of the MSAs and rows of the pair, everything of one axis whole.

    Every rank is given the same features and, for dropout, the same state of its random number generator. The
    tensors of the result are those of the single network; ``representations`` holds this rank's rows of ``msa`` and
    ``pair``, and so do the logits of the pair's and the MSA's heads if ``whole_logits`` is off.
    """

    shards: AxialShards
    whole_logits: bool = True

    def forward(
        self,
        features: FeatureSource,
        num_recycles: int | None = None,
        *,
        num_ensemble: int = 1,
        on_cycle: OnCycle | None = None,
    ) -> dict[str, Any]:
        """Fold; see :meth:`fastfold.evoformer.model.AlphaFold.forward`."""
        result = super().forward(features, num_recycles, num_ensemble=num_ensemble, on_cycle=on_cycle)
        if self.whole_logits:
            residues = result["representations"]["single"].shape[-2]
            for name in ("distogram", "predicted_aligned_error"):
                if name in result:
                    logits = self.shards.gather(result[name]["logits"], -3, residues)
                    result[name] = result[name] | {"logits": logits}
            # The shards of the MSA's own rows follow from those of a longer axis, with the templates' rows.
            logits = result["masked_msa"]["logits"]
            group = self.shards.group
            sizes = exchange_sizes(logits.shape[-3], group, logits.device)
            result["masked_msa"] = result["masked_msa"] | {"logits": gather(logits, -3, group, sizes)}
        return result

    def _pair_rows(self, residues: int) -> int:
        own = self.shards.own(residues)
        return own.stop - own.start

    def _represent(self, features: Features, previous: Features) -> Features:
        shards = self.shards
        residues, sequences = features["msa_feat"].shape[-2], features["msa_feat"].shape[-3]
        torsions = self.template_torsion_embedder
        templates = 0 if torsions is None else features["template_aatype"].shape[-2]
        # The MSA's rows are cut together with those of the templates that follow them.
        own, own_rows = shards.own(sequences + templates), shards.own(residues)
        first, last = min(own.start, sequences), min(own.stop, sequences)

        seen = features | {"msa_feat": features["msa_feat"][..., first:last, :, :]}
        msa, pair = self.input_embedder(seen, previous, first_sequence=first, first_row=own_rows.start)
        dtype = pair.dtype
        seq_mask = features["seq_mask"].to(dtype)
        pair_mask = seq_mask[..., :, None] * seq_mask[..., None, :]
        if self.template_embedder is not None:
            pair = self.template_embedder(pair, features, pair_mask, own_rows.start)
        extra = features | {key: shards.take(features[key], -2) for key in _EXTRA_MSA}
        embedded = self.extra_msa_embedder(extra_msa_features(extra).to(dtype))
        _, pair = self.extra_msa_stack(embedded, pair, features["extra_msa_mask"].to(dtype), pair_mask)
        del extra, embedded

        msa_mask = features["msa_mask"].to(dtype)
        if torsions is not None:
            template_rows, template_mask = torsions(features)
            part = slice(max(0, own.start - sequences), max(0, own.stop - sequences))
            msa = torch.cat([msa, template_rows[..., part, :, :]], dim=-3)
            msa_mask = torch.cat([msa_mask, template_mask.to(dtype)], dim=-2)
        msa, pair = self.evoformer(msa, pair, msa_mask, pair_mask)
        first_row = self._first_row(msa)
        return {
            "msa": msa[..., : last - first, :, :],
            "msa_first_row": first_row,
            "pair": pair,
            "single": self.single_projection(first_row),
        }

    def _first_row(self, msa: Tensor) -> Tensor:
        """First row ``[*, N, c_m]`` of the MSA, which rank 0 has, on every rank."""
        if msa.shape[-3] == 0:
            # Any tensor of the shape will do, but it has to hang on the graph as on the other ranks.
            msa = torch.cat([msa, msa.new_zeros(*msa.shape[:-3], 1, *msa.shape[-2:])], dim=-3)
        return broadcast(msa[..., :1, :, :], 0, self.shards.group).squeeze(-3)
