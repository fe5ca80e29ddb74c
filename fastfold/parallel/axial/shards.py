"""Dynamic axial parallelism: tensors cut along one axis, resharded to another axis between operations.

An operation along one axis of ``[A, B, c]`` (such as attention within rows) needs that axis whole and can be cut along
the other. :class:`AxialShards` holds the rule of the cut (any length over any number of ranks, without padding), the
reshard (all-to-all) and the gathers; ``matmul.py`` multiplies matrices whose contracted axis is cut.

Gradients are exact adjoints: after ``backward`` the ranks hold the gradient of the sum of all ranks' losses. If every
rank computes the same loss, a parameter's gradient is therefore the **mean** over the ranks, which
DDP and FSDP compute over data parallel ranks and these together.

A collective holds sent tensors until they arrive, and received ones until they are joined, while the next collective is
running. :func:`reshard_bytes`, :func:`gather_bytes` and :func:`contraction_exchange_bytes` count them for the largest
shard, that of rank 0.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.kernels.common.layout import padded_width
from fastfold.parallel.axial.matmul import ContractionSpec, block_channels, choose_contraction, contract
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, drain
from fastfold.parallel.comm.collectives import all_to_all_async, gather, gather_async
from fastfold.parallel.comm.groups import Group, shard_sizes, shard_slices
from fastfold.parallel.comm.moves import Move, Shards

# Bytes of a tensor that are summed at a time on a GPU; temporaries take eight times as many.
_CHECKSUM_BLOCK = 2**22

# Minimum number of elements of a block of channels in a reshard in place.
_BLOCK = 2**18


@dataclass(frozen=True)
class AxialShards:
    """Cut of axes over a group: consecutive shards, the first ones one longer; a shard may be empty."""

    group: Group

    def sizes(self, length: int) -> list[int]:
        """Return the lengths of all ranks' shards of an axis of ``length``."""
        return shard_sizes(length, self.group.size)

    def own(self, length: int) -> slice:
        """Return this rank's shard of an axis of ``length``."""
        return self.group.shard(length)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard, along ``dim``, of a tensor that every rank has; a view."""
        own = self.own(x.shape[dim])
        return x.narrow(dim, own.start, own.stop - own.start)

    def gather_async(self, x: Tensor, dim: int, length: int) -> AsyncResult[Tensor]:
        """Start joining the shards of an axis of ``length``: ``dim`` of ``x`` becomes whole on every rank."""
        return gather_async(x, dim, self.group, self.sizes(length))

    def gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        """Join the shards of an axis of ``length``: ``dim`` of ``x`` becomes whole on every rank."""
        return self.gather_async(x, dim, length).wait()

    def resharding(self, x: Tensor, *, cut: int, join: int, length: int) -> Move:
        """Return the move that cuts ``x`` along ``cut`` and joins ``join``, whose whole length is ``length``."""
        before = Shards(join % x.dim(), self.sizes(length))
        return Move(before=before, after=Shards(cut % x.dim(), self.sizes(x.shape[cut])))

    def reshard_async(self, x: Tensor, *, cut: int, join: int, length: int) -> AsyncResult[Tensor]:
        """Start cutting the dimension ``cut`` instead of ``join``, whose whole length is ``length``."""
        return all_to_all_async(x, cut, join, self.group, concat_sizes=self.sizes(length))

    def reshard(self, x: Tensor, *, cut: int, join: int, length: int) -> Tensor:
        """Move ``x`` from a shard along ``join``, an axis of ``length``, to a shard along ``cut``."""
        return self.reshard_async(x, cut=cut, join=join, length=length).wait()

    def reshard_into(
        self, x: Tensor, memory: Tensor, *, cut: int, join: int, length: int, blocks: int = 4
    ) -> Tensor:
        """Compute :meth:`reshard`, without gradients, in ``memory`` if the result fits there.

        The memory is contiguous, may be overwritten, and may be ``x``. At most ``blocks`` blocks of channels are moved
        one at a time; more blocks need less memory.
        """
        sizes, joined = self.sizes(x.shape[cut]), self.sizes(length)
        shape = list(x.shape)
        shape[cut], shape[join] = sizes[self.group.rank], length
        fits = (
            memory.is_contiguous() and memory.shape[-1] == x.shape[-1] and math.prod(shape) <= memory.numel()
        )
        out = memory.view(-1)[: math.prod(shape)].view(shape) if fits else x.new_empty(shape)
        # Channels are innermost, so a channel has the same addresses in both layouts: a block overwrites only its own.
        parts = shard_slices(x.shape[-1], max(1, min(blocks, x.numel() // _BLOCK)))
        move = Move(before=Shards(join % x.dim(), joined), after=Shards(cut % x.dim(), sizes))
        started = (async_ops.start_exchange([(x[..., block], move)], self.group) for block in parts)
        for block, (arrived,) in zip(parts, drain(started), strict=True):
            out[..., block] = arrived
        return out

    def contract(
        self,
        left: Tensor,
        right: Tensor,
        dim: int,
        length: int,
        *,
        free: bool = False,
        way: str = "auto",
        block_elements: int | None = None,
    ) -> Tensor:
        """Compute :func:`fastfold.parallel.axial.matmul.contract` over this group, both axes cut by this rule.

        ``length`` is that of the axis that is cut in the factors: the contracted one, or with ``free`` the other ones.
        The axis ``dim`` of the product is cut afterwards, -2 for A or -1 for B.
        """
        whole = length if free else left.shape[-2] if dim == -2 else right.shape[-2]
        spec = ContractionSpec(self.group, self.sizes(length), left.dim() + dim, self.sizes(whole), free)
        return contract(left, right, spec, way=way, block_elements=block_elements)


@dataclass(frozen=True)
class ShardRows:
    """This rank's consecutive rows of a tensor, and the other ranks'."""

    group: Group
    sizes: Sequence[int]

    @property
    def own(self) -> slice:
        """Rows of this rank."""
        start = sum(self.sizes[: self.group.rank])
        return slice(start, start + self.sizes[self.group.rank])

    def join(self, x: Tensor, dim: int = -2) -> Tensor:
        """Join all rows along ``dim``; ``x`` holds this rank's."""
        return gather(x, dim, self.group, self.sizes)


def check_alike(numbers: Mapping[str, int], group: Group, device: torch.device) -> None:
    """Refuse ranks with different inputs, before a collective hangs or their results mix.

    ``numbers`` are this rank's by name; the device is that of the group's messages.

    Raises:
        ConfigError: A number differs; every rank raises.
    """
    if group.is_alone:
        return
    own = torch.tensor(list(numbers.values()), dtype=torch.int64, device=device)
    of_ranks = async_ops.gather_numbers(own, group)
    for name, column in zip(numbers, of_ranks.unbind(1), strict=True):
        if bool((column != column[0]).any()):
            raise ConfigError(
                f"the ranks of one {group.name} group need the same inputs, but their {name} differs: {column.tolist()}"
            )


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Compute a checksum of tensors of any dtype, from names, shapes and bits: 0 to 2**32 - 1.

    Contiguous tensors on a CPU take no additional memory. Those on another device are summed there, in blocks. The
    order of the names does not count.
    """
    crc = 0
    for name in sorted(tensors):
        x = tensors[name].detach()
        crc = zlib.crc32(f"{name} {x.dtype} {list(x.shape)}".encode(), crc)
        if not x.numel():
            continue
        flat = x.contiguous().reshape(-1)
        if flat.stride(0) != 1:  # a tensor of one element may have any stride
            flat = flat.new_empty(len(flat)).copy_(flat)
        bits = flat.view(torch.uint8)
        if bits.device.type != "cpu":
            bits = torch.stack([_weighted_sum(block) for block in bits.split(_CHECKSUM_BLOCK)]).cpu()
        crc = zlib.crc32(bits.numpy().data, crc)
    return crc


def _weighted_sum(block: Tensor) -> Tensor:
    """Sum bytes ``[n]``, each times its position, so that the sum depends on their order; int64."""
    places = torch.arange(1, len(block) + 1, device=block.device)
    return (block * places).sum()


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
