"""Memory of the messages between ranks that share a target.

A collective holds sent tensors until they arrive, and received ones until they are joined,
while the next collective is running. The largest shard is that of rank 0.
"""

from __future__ import annotations

from fastfold.kernels.common.layout import padded_width
from fastfold.parallel.axial.matmul import block_channels, choose_contraction

# Blocks of channels of a reshard in place: more blocks need less memory and more time.
RESHARD_BLOCKS = (4, 8, 16, 32)
# Of a block of channels: two are sent and two arrive (this one and the next), and one is joined.
_UNDER_WAY = 5
# Of both factors of a block in the layout of channels: sent and arriving for this block and the next, two copies, the
# product before them and its result.
_CHANNELS_UNDER_WAY, _TERMS_UNDER_WAY = 12, 6
# The same of two blocks, without blocks before them.
_TWO_UNDER_WAY = 9


def reshard_bytes(shard: int, blocks: int) -> int:
    """Return the additional bytes of resharding a shard of this size."""
    return -(-_UNDER_WAY * shard // blocks)


def gather_bytes(heads: int, n: int, own: int, element_size: int) -> int:
    """Return the bytes of gathering a bias ``[H, N, N]``: the shard, received parts, and joined parts.

    The pair has ``n`` residues, the shard ``own`` of them.
    """
    return heads * n * (own + 2 * n) * element_size


def contraction_exchange_bytes(n: int, element_size: int, *, channels: int, ranks: int) -> int:
    """Return the additional bytes of contracting a group of channels, without its factors and result.

    The group has ``channels`` of them, the pair ``n`` residues.
    """
    way = choose_contraction("auto", n, n, n, channels, ranks)
    step, n = block_channels(n * n, channels, ranks), padded_width(n)
    # One block of every rank's matrices is here: shards of ``step`` channels for each rank, or whole products.
    shard = (
        min(channels, step * ranks) * -(-n // ranks) * n if way == "channels" else min(channels, step) * n * n
    )
    under_way = _TERMS_UNDER_WAY
    if way == "channels":
        under_way = _TWO_UNDER_WAY if -(-channels // ranks) <= 2 * step else _CHANNELS_UNDER_WAY
    return under_way * shard * element_size
