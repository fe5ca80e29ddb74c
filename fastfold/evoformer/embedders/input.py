"""Input and recycling embedders (supplement Algorithms 3 and 32)."""

from __future__ import annotations

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.data.features import coevolution
from fastfold.evoformer.embedders.relative_position import ChainRelativePosition, RelativePosition
from fastfold.evoformer.execution import PolicyModule, is_training
from fastfold.evoformer.primitives import LayerNorm, Linear, dropout, one_hot_linear
from fastfold.protein.all_atom import pseudo_beta


def distogram_bins(positions: Tensor, config: ConfigDict, rows: slice = slice(None)) -> Tensor:
    """Return the distance bin of each pair of residues, counted from 1; 0 for distances outside all bins.

    Args:
        positions: ``[*, N, 3]`` in Å.
        config: ``min_bin``, ``max_bin`` (lower edge of the first and last bin, Å) and ``num_bins``.
        rows: Residues whose rows are computed.

    Returns:
        ``[*, rows, N]`` int64. As in the official program, distances on an edge, under the first edge or over
        10,000 Å are outside all bins.
    """
    edges = torch.linspace(
        config.min_bin, config.max_bin, config.num_bins, dtype=positions.dtype, device=positions.device
    ).square()
    squared = (positions[..., rows, None, :] - positions[..., None, :, :]).square().sum(-1)
    bins = torch.bucketize(squared, edges)
    outside = (squared >= 1e8) | (squared == edges[bins.clamp(max=config.num_bins - 1)])
    return torch.where(outside, 0, bins)


class SequenceConvolution(nn.Module):
    """Residual 1-D convolutions over the features of each residue: cheap local context for small networks.

    AlphaFold has no such layer.

    Args:
        config: ``num_layer``, ``kernel_size`` (odd), ``num_channel``, and ``dropout_rate`` (before each layer and
            after the last).
        c_in: Input channels.
    """

    def __init__(self, config: ConfigDict, c_in: int) -> None:
        super().__init__()
        c, self.dropout_rate = config.num_channel, config.dropout_rate
        self.input = Linear(c_in, c)
        self.layers = nn.ModuleList(
            nn.Conv1d(c, c, config.kernel_size, padding=config.kernel_size // 2)
            for _ in range(config.num_layer)
        )

    def forward(self, x: Tensor, seq_mask: Tensor) -> Tensor:
        """Convolve ``x [*, N, c_in]`` along the residues into ``[*, N, c]``; chains count as one sequence.

        Residues of padding, where ``seq_mask [*, N]`` is 0, are zeros to every layer, like the ends of the sequence.
        """
        mask, training = seq_mask.to(x.dtype).unsqueeze(-2), is_training(self)
        x = self.input(x).transpose(-1, -2)
        for layer in self.layers:
            x = x + layer(dropout(F.relu(x), self.dropout_rate, training=training) * mask)
        return dropout(x.transpose(-1, -2), self.dropout_rate, training=training)


class InputEmbedder(PolicyModule):
    """Initial MSA and pair representations from features and the previous cycle (supplement Algorithms 3 and 32).

    Algorithm 3:

    - Lines 1-2: the pair is the sum of two projections of the target's features.
    - Line 3: relative positions are added (Algorithm 4).
    - Line 4: the MSA is the sum of its projected features and the projected features of the target.

    Algorithm 32:

    - Lines 1-2: distances between the previous cycle's CB atoms are binned and projected.
    - Line 3: the projection and the previous cycle's normalised pair are added to the pair.
    - Line 4: the previous cycle's normalised first MSA row is added to the first row of the MSA.

    A network with coevolution (not an official one) adds its projection to the target's features and to the pair.

    Args:
        config: Official ``embeddings_and_evoformer`` config node. The keys ``coevolution`` and
            ``sequence_convolution`` are optional.
        c_target: Channels of ``target_feat`` (22 monomer, 21 multimer).
        multimer: Use the chain-relative position encoding.
    """

    operator = "embedding"

    def __init__(self, config: ConfigDict, *, c_target: int, multimer: bool) -> None:
        super().__init__()
        self.prev_pos = config.prev_pos
        c_m, c_z = config.msa_channel, config.pair_channel
        self.coevolution: Linear | None = None
        if config.get("coevolution", False):
            self.coevolution = Linear(coevolution.PAIR_CHANNELS, c_z)
            c_target += coevolution.SINGLE_CHANNELS
        self.sequence_convolution: SequenceConvolution | None = None
        if "sequence_convolution" in config:
            self.sequence_convolution = SequenceConvolution(config.sequence_convolution, c_target)
            c_target = config.sequence_convolution.num_channel
        self.target_to_msa = Linear(c_target, c_m)
        self.msa = Linear(49, c_m)
        self.target_left = Linear(c_target, c_z)
        self.target_right = Linear(c_target, c_z)
        self.relative_position = ChainRelativePosition(config) if multimer else RelativePosition(config)
        self.prev_distance = Linear(config.prev_pos.num_bins, c_z) if config.recycle_pos else None
        self.prev_msa_norm = LayerNorm(c_m) if config.recycle_features else None
        self.prev_pair_norm = LayerNorm(c_z) if config.recycle_features else None

    def forward(
        self,
        features: dict[str, Tensor],
        previous: dict[str, Tensor],
        *,
        first_sequence: int = 0,
        first_row: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Embed one cycle's features, or a part of the rows of the MSA and of the pair.

        Args:
            features: AlphaFold's keys: ``target_feat [*, N, c_target]``, ``msa_feat [*, S, N, 49]``,
                ``residue_index [*, N]``, ``aatype [*, N]``, the chain ids for a multimer, ``seq_mask [*, N]`` for a
                network with convolutions, and the result of :func:`fastfold.data.features.coevolution.features` for a
                network with coevolution.
            previous: ``prev_pos [*, N, 37, 3]`` (Å), ``prev_msa_first_row [*, N, c_m]`` and
                ``prev_pair [*, rows, N, c_z]``; zeros in the first cycle. The memory of ``prev_pair``
                may be reused for the result.
            first_sequence: Index in the MSA of the first row of ``msa_feat``.
            first_row: Residue of the first row of ``prev_pair``.

        Returns:
            ``msa [*, S, N, c_m]`` and ``pair [*, rows, N, c_z]``.
        """
        target = self._target(features)
        msa = self._msa(features, target, previous, first_sequence)
        return msa, self._pair(features, target, previous, first_row)

    def _target(self, features: dict[str, Tensor]) -> Tensor:
        """Return the features ``[*, N, c_target]`` of single residues."""
        dtype = self.msa.weight.dtype
        target = features["target_feat"].to(dtype)
        if self.coevolution is not None:
            target = torch.cat([target, features["coevolution_single"].to(dtype)], dim=-1)
        if self.sequence_convolution is None:
            return target
        return self.sequence_convolution(target, features["seq_mask"])

    def _msa(
        self, features: dict[str, Tensor], target: Tensor, previous: dict[str, Tensor], first_sequence: int
    ) -> Tensor:
        dtype = self.msa.weight.dtype
        target = self.target_to_msa(target).unsqueeze(-3)

        def sequences(rows: Tensor, index: slice) -> Tensor:
            msa = self.msa(rows.to(dtype)) + target
            # Zero rows if another process has the MSA's first row, so that all processes record the same graph.
            count = 1 if index.start == 0 else 0
            if self.prev_msa_norm is not None and (count or torch.is_grad_enabled()):
                recycled = self.prev_msa_norm(previous["prev_msa_first_row"]).unsqueeze(-3)[..., :count, :, :]
                first = (msa[..., :count, :, :] + recycled).to(msa.dtype)
                msa = torch.cat([first, msa[..., count:, :, :]], dim=-3)
            return msa

        msa_feat = features["msa_feat"]
        widening = -(-self.msa.out_features // msa_feat.shape[-1])
        return self.policy.map(msa_feat, sequences, dim=-3, start=first_sequence, channels=widening)

    def _pair(
        self, features: dict[str, Tensor], target: Tensor, previous: dict[str, Tensor], first_row: int
    ) -> Tensor:
        left, right = self.target_left(target), self.target_right(target)
        beta = pseudo_beta(features["aatype"], previous["prev_pos"])

        def pair_rows(previous_rows: Tensor, rows: slice) -> Tensor:
            pair = left[..., rows, None, :] + right[..., None, :, :]
            if self.prev_distance is not None:
                bins = distogram_bins(beta, self.prev_pos, rows)
                embedded = one_hot_linear(self.prev_distance, (bins - 1).clamp(min=0))
                pair = pair + torch.where(bins.unsqueeze(-1) > 0, embedded, 0) + self.prev_distance.bias
            if self.coevolution is not None:
                coupled = features["coevolution_pair"][..., rows, :, :]
                pair = pair + self.coevolution(coupled.to(left.dtype))
            if self.prev_pair_norm is not None:
                pair = pair + self.prev_pair_norm(previous_rows)
            # Under autocast some terms are float32, and a float32 pair would make the whole trunk run in float32.
            return (pair + self.relative_position(features, rows)).to(left.dtype)

        return self.policy.map(previous["prev_pair"], pair_rows, dim=-3, start=first_row, consume=True)


EXTRA_MSA_FEATURES = ("extra_msa", "extra_has_deletion", "extra_deletion_value")
"""Keys that :func:`extra_msa_features` reads."""


def extra_msa_features(features: dict[str, Tensor]) -> Tensor:
    """Return the features ``[*, E, N, 25]`` of the extra MSA: one-hot residue, has-deletion flag, deletion value."""
    one_hot = F.one_hot(features["extra_msa"].long(), 23).to(features["extra_deletion_value"].dtype)
    return torch.cat(
        [one_hot, features["extra_has_deletion"][..., None], features["extra_deletion_value"][..., None]], -1
    )
