"""What the steps of a fold hold on one of several ranks for what they send to each other.

Everything is 0 on one rank. A collective holds what it sends until it has arrived, and what arrives until it is joined;
the next one is under way meanwhile. The largest shard is that of rank 0.
"""

from __future__ import annotations

from fastfold.kernels.common.layout import padded_width
from fastfold.parallel.axial.matmul import block_channels, choose_contraction

# Blocks of channels in which a tensor is resharded in its own memory: more of them hold less and take longer.
RESHARD_BLOCKS = (4, 8, 16, 32)
# Of a block of channels: two are sent and two arrive (this one and the next), and one is joined.
_UNDER_WAY = 5
# Of both factors of a block in the layout of channels: sent and arriving for this block and the next, two copies, the
# product before them and its result.
_CHANNELS_UNDER_WAY, _TERMS_UNDER_WAY = 12, 6
# The same of two blocks, which have none before them.
_TWO_UNDER_WAY = 9


def reshard_bytes(shard: int, blocks: int, ranks: int) -> int:
    """Bytes that exchanging the cut axis of a shard of this size takes in addition to it."""
    return -(-_UNDER_WAY * shard // blocks) if ranks > 1 else 0


def gather_bytes(own: int, whole: int, ranks: int) -> int:
    """Bytes that joining shards takes: the shard, what arrives and what is joined of it (or the only copy of all)."""
    return own + 2 * whole if ranks > 1 else whole


def contraction_exchange_bytes(n: int, element_size: int, *, channels: int, ranks: int) -> int:
    """Bytes that contracting a group of channels takes in addition to its factors and its result.

    Args:
        n: Residues.
        element_size: Bytes per element.
        channels: Of the group.
        ranks: How many there are.
    """
    if ranks == 1:
        return 0
    way = choose_contraction("auto", n, n, n, channels, ranks)
    step, n = block_channels(n * n, channels, ranks), padded_width(n)
    # Of every rank's matrices one block is here: shards of ``step`` channels for each rank, or whole products.
    shard = (
        min(channels, step * ranks) * -(-n // ranks) * n if way == "channels" else min(channels, step) * n * n
    )
    under_way = _TERMS_UNDER_WAY
    if way == "channels":
        under_way = _TWO_UNDER_WAY if -(-channels // ranks) <= 2 * step else _CHANNELS_UNDER_WAY
    return under_way * shard * element_size
