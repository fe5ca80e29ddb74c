"""Relative positions within a chain, within a cyclic chain and between chains (supplement Algorithms 4 and 5)."""

from __future__ import annotations

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn

from fastfold.evoformer.primitives import Linear, one_hot_linear


def ring_offset(offset: Tensor, features: dict[str, Tensor], rows: slice) -> Tensor:
    """Return differences of residue numbers, the shorter way around in cyclic chains.

    The cyclic offset of Rettie et al. (2023): residue 1 of a ring of 10 follows residue 10. Residues exactly half a
    ring apart keep the sign of their difference.

    Args:
        offset: ``[*, rows, N]`` integers.
        features: ``ring_length [*, N]`` (optional), the size of each residue's ring, 0 in open chains. Residues that
            differ by the size of the ring or more are in different chains.
        rows: Residues of the rows of ``offset``.
    """
    if "ring_length" not in features:
        return offset
    length = features["ring_length"].long()[..., rows, None]
    is_longer_way = (2 * offset.abs() > length) & (offset.abs() < length)
    return torch.where(is_longer_way, offset - length * offset.sign(), offset)


class RelativePosition(nn.Module):
    """Relative position in the chain (supplement Algorithm 4).

    - Line 1: the difference of two residues' numbers.
    - Line 2: the difference, clipped to ``max_relative_feature`` either way, is one-hot encoded (Algorithm 5) and
      projected.
    """

    def __init__(self, config: ConfigDict) -> None:
        super().__init__()
        self.max_offset = config.max_relative_feature
        self.linear = Linear(2 * self.max_offset + 1, config.pair_channel)

    def forward(self, features: dict[str, Tensor], rows: slice) -> Tensor:
        """Encode ``residue_index [*, N]`` and the optional ``ring_length [*, N]`` as ``[*, rows, N, c_z]``."""
        position = features["residue_index"].long()
        offset = ring_offset(position[..., rows, None] - position[..., None, :], features, rows)
        index = offset.clamp(-self.max_offset, self.max_offset) + self.max_offset
        return one_hot_linear(self.linear, index) + self.linear.bias


class ChainRelativePosition(nn.Module):
    """Relative position, entity and copy number between chains (AlphaFold-Multimer, section 7.1).

    - Within a chain the difference of residue numbers is clipped and one-hot encoded; pairs of different chains have
      a class of their own.
    - One channel is 1 if both residues are of the same entity.
    - Within an entity the difference of copy numbers is clipped and one-hot encoded; pairs of different entities have
      a class of their own.
    - The concatenation is projected.
    """

    def __init__(self, config: ConfigDict) -> None:
        super().__init__()
        self.max_offset, self.max_chain = config.max_relative_idx, config.max_relative_chain
        self.linear = Linear(2 * self.max_offset + 2 + 1 + 2 * self.max_chain + 2, config.pair_channel)

    def forward(self, features: dict[str, Tensor], rows: slice) -> Tensor:
        """Encode residue numbers, chains and entities as ``[*, rows, N, c_z]``.

        Reads ``residue_index``, ``asym_id``, ``entity_id`` and ``sym_id``, each ``[*, N]``, and the optional
        ``ring_length [*, N]``.
        """

        def difference(key: str) -> Tensor:
            value = features[key].long()
            return value[..., rows, None] - value[..., None, :]

        def clipped(delta: Tensor, limit: int, same: Tensor) -> Tensor:
            return torch.where(same, delta.clamp(-limit, limit) + limit, 2 * limit + 1)

        same_chain, same_entity = difference("asym_id") == 0, difference("entity_id") == 0
        offset = ring_offset(difference("residue_index"), features, rows)
        position = clipped(offset, self.max_offset, same_chain)
        copy = clipped(difference("sym_id"), self.max_chain, same_entity)
        entity_channel = 2 * self.max_offset + 2
        entity = same_entity.unsqueeze(-1) * self.linear.weight[:, entity_channel]
        return (
            one_hot_linear(self.linear, position)
            + entity
            + one_hot_linear(self.linear, copy, entity_channel + 1)
            + self.linear.bias
        )
