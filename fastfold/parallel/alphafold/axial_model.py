"""The network outside the blocks, on shards: embedding, recycling, structure module, heads."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.evoformer.embedders.input import EXTRA_MSA_FEATURES
from fastfold.evoformer.execution import LazyRows, is_training, random_state
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.model import AlphaFold, Features, FeatureSource
from fastfold.evoformer.primitives import Linear
from fastfold.evoformer.structure.invariant_point_attention import InvariantPointAttention, PairTerms
from fastfold.parallel.axial.shards import AxialShards, ShardRows, check_alike, checksum
from fastfold.parallel.comm.collectives import all_reduce, broadcast, exchange_sizes, gather
from fastfold.protein.rigid import Rigid


class AxialInvariantPointAttention(InvariantPointAttention):
    """Updates of this rank's residues, from its rows of the pair, gathered."""

    shards: AxialShards

    def forward(
        self,
        single: Tensor,
        pair: Tensor | LazyRows | PairTerms,
        frames: Rigid,
        mask: Tensor,
        rows: slice = slice(None),
    ) -> Tensor:
        """Update ``[*, N, c_s]`` from a shard ``pair [*, n, N, c_z]``; everything else is whole."""
        residues = single.shape[-2]
        update = super().forward(single, pair, frames, mask, self.shards.own(residues))
        return self.shards.gather(update, -2, residues)

    def pair_terms(self, pair: Tensor, mask: Tensor, rows: slice | None = None) -> PairTerms:
        """Return the terms of ``rows``, by default those of this rank."""
        return super().pair_terms(pair, mask, self.shards.own(mask.shape[-1]) if rows is None else rows)


class AxialDistogramHead(DistogramHead):
    """Logits of this rank's rows; the transposed half is received from the other ranks."""

    shards: AxialShards
    has_columns = False

    def transposed(self, half: Tensor) -> Tensor:
        """Return rows ``[*, n, N, bins]`` of the transposed tensor, from its rows."""
        columns = self.shards.reshard(half, cut=-2, join=-3, length=half.shape[-2])
        return columns.transpose(-2, -3)


class AxialAlphaFold(AlphaFold):
    """The network on shards: sequences of the MSAs and rows of the pair; tensors of one axis are whole.

    Every rank needs the same features and, for dropout, the same state of its random number generator. The result is
    that of the single network, with three exceptions:

    - ``representations`` holds this rank's rows of ``msa`` and ``pair``.
    - When gradients are recorded, logits of heads for pairs and the masked MSA are this rank's rows too. The result
      has ``rows``, by which the losses join their errors.
    - Logits that are computed on access have to be accessed on all ranks alike.
    """

    shards: AxialShards

    def forward(
        self, features: FeatureSource, num_recycles: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Fold; see :meth:`fastfold.evoformer.model.AlphaFold.forward`."""
        result = super().forward(features, num_recycles, **options)
        group = self.shards.group
        for name in ("distogram", "predicted_aligned_error", "masked_msa"):
            if name not in result:
                continue
            logits = result[name]["logits"]
            if name == "masked_msa":
                # With templates, the MSA's rows are a shard of a longer axis that includes the templates' rows.
                sizes = exchange_sizes(logits.shape[-3], group, logits.device)
            else:
                sizes = self.shards.sizes(logits.shape[-2])
            rows = ShardRows(group, sizes)
            if torch.is_grad_enabled():
                result[name] = result[name] | {"rows": rows}
            elif isinstance(logits, LazyRows):
                result[name] = result[name] | {"logits": self._whole_rows(logits)}
            else:
                result[name] = result[name] | {"logits": rows.join(logits, -3)}
        return result

    def whole_rows(self, pair: Tensor) -> Tensor:
        """Return all rows ``[*, N, N, c]`` of a tensor of pairs; all ranks have to call it alike."""
        return ShardRows(self.shards.group, self.shards.sizes(pair.shape[-2])).join(pair, -3)

    def _whole_rows(self, logits: LazyRows) -> LazyRows:
        """Return all rows ``[*, N, N, bins]`` from this rank's, computed and joined on access."""
        residues = logits.shape[-2]
        sizes = self.shards.sizes(residues)
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]

        def rows(index: slice) -> Tensor:
            """Join every rank's part of a block of rows."""
            within = [
                slice(min(max(index.start - start, 0), size), min(max(index.stop - start, 0), size))
                for start, size in zip(starts, sizes, strict=True)
            ]
            group = self.shards.group
            part = logits.rows(within[group.rank])
            return gather(part, -3, group, [each.stop - each.start for each in within])

        return LazyRows(
            torch.no_grad()(rows), (*logits.shape[:-3], residues, *logits.shape[-2:]), logits.policy
        )

    def _own_rows(self, residues: int) -> slice:
        return self.shards.own(residues)

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.shards.group)

    def _own_sequences(self, sequences: int, templates: int) -> tuple[slice, slice]:
        """Return slices of this rank's rows of the MSA and of the templates.

        Both are cut as one axis, with the templates last.
        """
        own = self.shards.own(sequences + templates)
        return (
            slice(min(own.start, sequences), min(own.stop, sequences)),
            slice(max(own.start - sequences, 0), max(own.stop - sequences, 0)),
        )

    def _embed_inputs(self, features: Features, previous: Features) -> tuple[Tensor, Tensor]:
        """Embed this rank's sequences of the MSA and rows of the pair."""
        sequences, residues = features["msa_feat"].shape[-3:-1]
        templates = 0
        if self.template_torsion_embedder is not None:
            templates = features["template_aatype"].shape[-2]
        self._check_alike(features)
        own, _ = self._own_sequences(sequences, templates)
        features["msa_feat"] = features["msa_feat"][..., own, :, :]
        first_row = self._own_rows(residues).start
        msa, pair = self.input_embedder(features, previous, first_sequence=own.start, first_row=first_row)
        return msa, pair

    def _template_rows(self, embedder: nn.Module, features: Features) -> tuple[Tensor, Tensor]:
        rows, mask = super()._template_rows(embedder, features)
        _, own = self._own_sequences(features["msa_mask"].shape[-2], mask.shape[-2])
        return rows[..., own, :, :], mask

    def _embed_extra_msa(self, embedder: Linear, features: Features) -> Tensor:
        for key in EXTRA_MSA_FEATURES:
            features[key] = self.shards.take(features[key], -2)
        return super()._embed_extra_msa(embedder, features)

    def _check_alike(self, features: Features) -> None:
        device = self.single_projection.weight.device
        numbers = {
            "number of residues": features["msa_feat"].shape[-2],
            "number of sequences": features["msa_feat"].shape[-3],
            "number of extra sequences": features["extra_msa"].shape[-2],
        }
        # A fake group has no other ranks whose generators could differ.
        if self.shards.group.backend != "fake":
            numbers["features (checksum)"] = checksum(features)
            if is_training(self):
                state = random_state(device)
                numbers["random number generator's state"] = zlib.crc32(state.numpy().tobytes())
        check_alike(numbers, self.shards.group, device)

    def _first_row(self, msa: Tensor) -> Tensor:
        """Return the first row ``[*, N, c_m]`` of the MSA on every rank; rank 0 holds it."""
        if msa.shape[-3] == 0:
            # The values are not used, but the tensor has to be in the graph as on the other ranks.
            msa = torch.cat([msa, msa.new_zeros(*msa.shape[:-3], 1, *msa.shape[-2:])], dim=-3)
        return broadcast(msa[..., :1, :, :], 0, self.shards.group).squeeze(-3)
