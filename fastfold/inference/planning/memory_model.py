"""Memory of every step of a fold, and the candidates for running it.

Those of single layers are in :mod:`~fastfold.inference.planning.layer_costs`; this module adds the tensors that are
resident while they run. ``U``, the size of the pair tensor, dominates for long targets. If several ranks share
a target, each holds a shard, and in addition its messages (:mod:`fastfold.parallel.axial.shards`). Tensors are
offloaded to the host's memory, then to a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from ml_collections import ConfigDict

from fastfold.data.features.transforms import Alignment, RandomDraw, cluster_features
from fastfold.evoformer.config import ensemble_size, is_multimer
from fastfold.evoformer.structure.distogram_descent import descent_bytes
from fastfold.inference.planning.layer_costs import (
    ATTENTION,
    MSA,
    LayerSizes,
    aligned_error_bytes,
    embedding_bytes,
    evoformer_costs,
    point_attention_bytes,
    template_bytes,
)
from fastfold.inference.planning.time_model import Costs, StepTimes, template_channels
from fastfold.kernels.common.layout import GPU_POSITIONS, padded_width
from fastfold.kernels.cpu.products import onednn_bytes
from fastfold.kernels.ops.gated_attention.passes import lanes_bytes
from fastfold.kernels.ops.triangle_multiplication.passes import contraction_bytes
from fastfold.memory.block_sizes import BlockedOperator, Candidate
from fastfold.memory.offload import kept_rows
from fastfold.parallel.axial.shards import (
    RESHARD_BLOCKS,
    contraction_exchange_bytes,
    gather_bytes,
    reshard_bytes,
)

_STEPS = 8  #: Steps in which a tensor is offloaded, unless the capacity is smaller


@dataclass(frozen=True)
class OffloadShare:
    """Number of offloaded rows of a tensor, of all its rows, and their bytes."""

    rows: int
    of: int
    nbytes: int

    @property
    def kept(self) -> float:
        """Share of the rows that stay on the device."""
        return 1.0 - self.share

    @property
    def share(self) -> float:
        """Share of the rows that are offloaded."""
        return self.rows / self.of if self.of else 0.0


@dataclass(frozen=True)
class OffloadRoom:
    """Bytes for offloaded tensors in the host's memory, and on a disk, used when that is full."""

    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Total number of bytes."""
        return self.host + self.disk

    def choices(self, rows: int, row_bytes: int, *, used: int = 0) -> Iterator[OffloadShare]:
        """Yield offloaded shares of a tensor's rows, from nothing to all or the capacity without ``used`` bytes."""
        on_host, in_all = (max(0, room - used) // row_bytes for room in (self.host, self.total))
        counts = {rows * step // _STEPS for step in range(_STEPS + 1)}
        for count in sorted(counts | {min(rows, on_host), min(rows, in_all)}):
            if count <= in_all:
                yield OffloadShare(count, rows, count * row_bytes)

    def split(self, nbytes: int, piece: int = 0) -> tuple[int, int]:
        """Split bytes between host and disk; the last ``piece`` on the host may have to go to the disk whole."""
        host = min(nbytes, self.host)
        disk = nbytes - host
        return host, min(nbytes, disk + piece) if disk else 0


_FIXED_CPU, _GAPS_CPU, _GAPS_EXACT = 40 << 20, 5, 3
"""Bytes of a process on a CPU in addition to a fold's tensors: fixed ones, and a multiple of a block's.

They are PyTorch's own buffers with the operators' blocks of at most 4 MiB of float32, and gaps that blocks leave in the
heap, fewer where blocks are in float32. ``tests.inference.planning.measure_fold`` measures their sum, and a slow test
compares it with the plan. The program itself, with code and threads, is not included; it takes some 400 MiB."""

_MONOMER_ROW, _MULTIMER_ROW = 2 * (1 + 4), 1 + 4 + 2 * 4
"""Bytes per row and residue of an alignment on the host: its types or letters, deletions, and a multimer's two masks.

A monomer's is there as :class:`~fastfold.data.msa.msa.Msa` and as
:class:`~fastfold.data.features.transforms.Alignment`; a multimer's counts once, because each chain's is cropped."""

Workspace = Callable[[int], int]  #: Function from elements of a block to bytes

ATTENTION_STEPS = (MSA, ATTENTION)  #: Steps with attention in blocks of rows
IN_ROWS = (
    *("embedding", "MSA attention", "outer product mean", "triangle attention", "structure module", "heads"),
)
"""Steps that run in blocks of rows."""

CONTEXT_CUDA, WORKSPACE_CUDA, GAPS_CUDA = 480 << 20, 32 << 20, 256 << 20
FIXED_CUDA = CONTEXT_CUDA + 2 * WORKSPACE_CUDA + GAPS_CUDA
"""Bytes of a GPU reserved for memory that plans do not count.

They are for the driver's context, the workspaces of cuBLAS and cuBLASLt (32 MiB each on an H100), and gaps between
blocks of PyTorch's allocator."""

CUDA_BLOCK = GPU_POSITIONS << 10
"""Elements of the largest block of attention on a GPU, with 1,024 channels in all, where no step computes more."""
FIXED_NCCL = 1 << 30  #: Bytes of a GPU reserved for the buffers of NCCL if several GPUs share a target
MAX_BLOCK = 1 << 22  #: Elements of the largest blocks of rows on a CPU; larger ones are not faster
MAX_BLOCK_CUDA = 1 << 26
"""Elements of the largest blocks of rows on a GPU: 200 rows of 2,500 residues, 26 rows of 20,000."""
TEMPLATE_BLOCK = 1 << 20  #: Elements of the blocks of the template embedding


def max_block(device: str) -> int:
    """Return the elements of the largest block of rows on a type of device."""
    return MAX_BLOCK if device == "cpu" else MAX_BLOCK_CUDA


def nccl_bytes(ranks: int) -> int:
    """Return the bytes of each GPU for NCCL: 0 for a single GPU."""
    return FIXED_NCCL if ranks > 1 else 0


@dataclass(frozen=True)
class Fold:
    """Sizes of one fold; other attributes are those of a :class:`~fastfold.inference.planning.planner.Planner`."""

    residues: int  #: N, all chains together
    element_size: int
    clusters: int  #: Rows of the MSA
    extra: int  #: Rows of the extra MSA
    templates: int  #: Number of templates
    rows: int  #: Rows of all alignments
    parameters: int
    device: str
    ranks: int = 1
    cuda_graph: bool = False

    @property
    def own(self) -> int:
        """Residues of the largest shard."""
        return -(-self.residues // self.ranks)

    @property
    def pairs(self) -> int:
        """Pairs of residues of the largest shard."""
        return self.own * self.residues

    @property
    def attends_at_once(self) -> bool:
        """True if attention of a block of rows is computed at once."""
        return self.device == "cuda" and self.ranks == 1

    @property
    def max_block(self) -> int:
        """Elements of the largest block of rows."""
        return max_block(self.device)

    def msa_positions(self, rows: int) -> int:
        """Return the positions of the largest shard of rows of an MSA, sharded along either axis."""
        return max(-(-rows // self.ranks) * self.residues, rows * self.own)

    def layer_sizes(self, rows: int, c_m: int, c_z: int) -> LayerSizes:
        """Return the sizes of layers that read ``rows`` of an MSA of ``c_m`` channels and a pair of ``c_z``."""
        shared = (self.element_size, self.ranks, self.attends_at_once)
        return LayerSizes(rows, self.residues, self.own, c_m, c_z, *shared)


@cache
def alignment_feature_bytes() -> dict[str, int]:
    """Return the bytes of each feature of the alignments, per row and residue."""
    one = np.ones((1, 1), np.float32)
    alignment = Alignment(one.astype(np.uint8), one, one, one, one[0], one)
    draw = RandomDraw(np.arange(1), np.arange(1), 1, one > 0, alignment.msa)
    return {name: value.nbytes for name, value in cluster_features(alignment, draw, one, one).items()}


def row_elements(config: ConfigDict, fold: Fold) -> dict[str, int]:
    """Return the elements of one row, for each step that runs in blocks of rows."""
    c = config.model.embeddings_and_evoformer
    n = fold.residues
    # Sharded along the sequences, a rank holds whole columns; along the residues, whole rows.
    columns = max(fold.extra * c.extra_msa_channel, (fold.clusters + fold.templates) * c.msa_channel)
    bins = config.model.heads.predicted_aligned_error.num_bins
    return dict.fromkeys(IN_ROWS, n * c.pair_channel) | {"MSA attention": columns, "heads": n * bins}


def operators(config: ConfigDict, fold: Fold, costs: Costs, *, room: OffloadRoom) -> list[BlockedOperator]:
    """Return every step of a fold that can be the largest, with its candidates."""
    c, heads = config.model.embeddings_and_evoformer, config.model.heads
    n, e, pairs, whole, ranks = fold.residues, fold.element_size, fold.pairs, fold.residues**2, fold.ranks
    shard, mask = pairs * c.pair_channel * e, whole * e
    fixed = _FIXED_CPU + fold.rows * n * (_MULTIMER_ROW if is_multimer(config) else _MONOMER_ROW)
    fixed += onednn_bytes() + lanes_bytes(n, max(c.msa_channel, c.pair_channel))
    if fold.device == "cuda":
        fixed = FIXED_CUDA + CUDA_BLOCK * e + nccl_bytes(ranks)
    msa_rows = fold.clusters + fold.templates
    msa = fold.msa_positions(msa_rows) * c.msa_channel * e
    each = alignment_feature_bytes()
    of_extra = sum(nbytes for name, nbytes in each.items() if name.startswith("extra_"))
    # Masks and masked rows of clusters live to the end of a cycle.
    of_cluster, rest = each["msa_feat"], sum(each.values()) - of_extra - each["msa_feat"]
    extra_features = fold.extra * n * of_extra
    extra = fold.msa_positions(fold.extra) * c.extra_msa_channel * e
    features = fold.clusters * n * (of_cluster + rest) + extra_features
    # Of an ensemble: the pair before the cycle, from which each member starts, the sum of the finished members, and the
    # features of later ones.
    members = ensemble_size(config)
    ensemble = (min(members, 3) - 1) * shard + (members - 1) * features
    always = fixed + fold.parameters + shard + mask + ensemble
    steps, row = costs.of(config, fold), row_elements(config, fold)
    layers = fold.layer_sizes(msa_rows, c.msa_channel, c.pair_channel)
    exact_logits = 2 * 4 * whole
    if fold.cuda_graph:
        # Copies of each pass's inputs and of the parameters, and the pair that it returns. The graph keeps its memory,
        # so the heads use memory in addition to it.
        block = min(fold.own * row["heads"], max(fold.max_block, row["heads"]))
        always += fold.parameters + members * features + 2 * shard + exact_logits + aligned_error_bytes(block)

    def cut(name: str, resident: int, workspace: Workspace) -> BlockedOperator:
        gaps = 0
        if fold.device == "cpu":
            gaps = (_GAPS_EXACT if name in ("embedding", "structure module") else _GAPS_CPU) * e
        at_once = fold.attends_at_once and name in ATTENTION_STEPS
        largest = fold.own if at_once else min(fold.own, fold.max_block // row[name])
        sizes = [max(1, largest >> k) for k in range(24)]
        candidates = [
            Candidate(
                size,
                workspace(size * row[name]) + gaps * size * row[name],
                steps.work[name] + steps.per_block[name] * -(-fold.own // size),
            )
            for size in dict.fromkeys(sizes)
        ]
        return BlockedOperator(name, resident, tuple(candidates), "rows")

    planned = [cut("embedding", always + msa + features, partial(embedding_bytes, c, layers))]
    masks = (fold.extra + msa_rows) * n * e
    in_stack = always + msa + extra + masks + fold.clusters * n * rest
    if ranks > 1:
        largest = max(shard, msa, extra)
        exchanges = [
            Candidate(blocks, reshard_bytes(largest, blocks), blocks * steps.per_exchange)
            for blocks in RESHARD_BLOCKS
        ]
        planned.append(BlockedOperator("exchange", in_stack, tuple(exchanges), "blocks of channels"))
    planned += [cut(name, in_stack, workspace) for name, workspace in _stack_bytes(config, fold).items()]
    planned.append(_multiplication(config, fold, steps, in_stack, room))
    if fold.templates:
        planned.append(_templates(config, fold, steps, always + msa + extra_features, room))
    structure = heads.structure_module
    trunk_done = always - mask - ensemble + n * 4 * 8 * (structure.num_channel + 8 * 14 * 3)
    attention = partial(point_attention_bytes, structure, layers)
    planned.append(cut("structure module", trunk_done, attention))
    if "distogram_descent" in structure:
        exact_logits += descent_bytes(fold.own, n, heads.distogram.num_bins)

    def scores(elements: int) -> int:
        # One rank owns the rows of a block and sends a copy of them to each other rank.
        copies = 4 * (ranks + 2) * elements if ranks > 1 else 0
        return exact_logits + aligned_error_bytes(elements) + copies

    planned.append(cut("heads", trunk_done, scores))
    return planned


def _stack_bytes(config: ConfigDict, fold: Fold) -> dict[str, Workspace]:
    """Return the bytes of the steps of blocks that run in blocks of rows, by their names in plans."""
    c = config.model.embeddings_and_evoformer
    extra = fold.layer_sizes(fold.extra, c.extra_msa_channel, c.pair_channel)
    main = fold.layer_sizes(fold.clusters + fold.templates, c.msa_channel, c.pair_channel)
    layers = [*evoformer_costs(c.evoformer, extra, global_column=True), *evoformer_costs(c.evoformer, main)]

    def largest(step: str, elements: int) -> int:
        return max(one.nbytes(elements) for one in layers if one.step == step)

    return {
        step: partial(largest, step) for step in dict.fromkeys(one.step for one in layers) if step in IN_ROWS
    }


def channel_groups(channels: int, ranks: int = 1, device: str = "cpu", element_size: int = 4) -> list[int]:
    """Return the numbers of channels per group of a triangle multiplication, fastest first; one group per rank.

    Each group reads the pair again, so a GPU of its own begins with all channels, and so does a CPU in 16 bits. More
    are not faster in float32 on CPUs.
    """
    whole = ranks == 1 and (device == "cuda" or element_size == 2)
    largest = channels if whole else max(1, channels // 4)
    return list(dict.fromkeys(max(min(channels, ranks), largest >> k) for k in range(largest.bit_length())))


def _product_width(fold: Fold) -> int:
    """Return the columns of a product; a whole product on a GPU is padded."""
    return padded_width(fold.residues) if fold.ranks == 1 and fold.device == "cuda" else fold.own


def _product_bytes(fold: Fold, c: int, *, channels: int, away: float) -> int:
    """Return the bytes of a triangle multiplication with a share of its product offloaded, including its mask."""
    n, e = fold.residues, fold.element_size
    if fold.ranks == 1:
        sizes = {"channels": channels, "width": _product_width(fold)}
        return contraction_bytes(n, c, e, **sizes, streamed=away > 0, kept=1.0 - away) + n * n
    group = channels * fold.pairs * e
    # The factors, their results, and messages between the ranks.
    contracting = 3 * group + contraction_exchange_bytes(n, e, channels=channels, ranks=fold.ranks)
    # The shard is cut along its columns or along its rows.
    kept = max(kept_rows(n, 1.0 - away) * fold.own, kept_rows(fold.own, 1.0 - away) * n)
    # Two parts being offloaded, and later two returning blocks, which fit into the factors' memory.
    staging = 2 * group * channels // c if away else 0
    return kept * c * e + contracting + staging


def _multiplication(
    config: ConfigDict, fold: Fold, steps: StepTimes, resident: int, room: OffloadRoom
) -> BlockedOperator:
    """Return the operator of a triangle multiplication in groups of channels, with its product offloaded or not."""
    evoformer = config.model.embeddings_and_evoformer.evoformer
    n, e = fold.residues, fold.element_size
    c = evoformer.triangle_multiplication_outgoing.num_intermediate_channel
    candidates = []
    row = c * _product_width(fold) * e
    for away in room.choices(n, row):
        for channels in channel_groups(c, fold.ranks, fold.device, fold.element_size):
            host, disk = room.split(away.nbytes, channels * fold.pairs * e)
            if disk > room.disk:
                continue
            on_disk = disk / (row * n)
            candidates.append(
                Candidate(
                    channels,
                    _product_bytes(fold, c, channels=channels, away=away.share),
                    steps.trunk.seconds(-(-c // channels), away=away.share, on_disk=on_disk),
                    host=host,
                    disk=disk,
                    settings={"kept": away.kept},
                )
            )
    return BlockedOperator("triangle multiplication", resident, tuple(candidates), "channels")


def template_copies(count: int, *, multimer: bool) -> int:
    """Count copies of the pair in the template embedding: offload, return, templates' reads and writes."""
    return 4 + count if multimer else 2 + 3 * count


def _templates(
    config: ConfigDict, fold: Fold, steps: StepTimes, resident: int, room: OffloadRoom
) -> BlockedOperator:
    """Return the operator of templates: embeddings kept (size 1) or computed twice (size 0), in groups of channels.

    Products of their triangle multiplications can be offloaded, and so can the pair, which each template then reads.
    """
    template = config.model.embeddings_and_evoformer.template
    n, e, pairs, count = fold.residues, fold.element_size, fold.pairs, fold.templates
    multimer = is_multimer(config)
    stack, c = template.template_pair_stack, template_channels(config)
    one = pairs * c * e
    sizes = fold.layer_sizes(count, c, config.model.embeddings_and_evoformer.pair_channel)
    shard = pairs * sizes.c_z * e
    block = template_bytes(template, sizes, min(TEMPLATE_BLOCK, pairs * sizes.c_z), multimer=multimer)
    # In addition to the current template: the sum of the earlier ones, or their scores, and the kept ones.
    scores = 0 if multimer else 4 * count * template.attention.num_head * pairs
    kept = {1: one if multimer else (count - 1) * one + scores}
    if not multimer and count > 1:
        kept[0] = scores
    heads = stack.triangle_attention_ending_node.num_head
    joined = 0
    if fold.ranks > 1:
        joined = max(gather_bytes(heads, n, fold.own, e), reshard_bytes(one, RESHARD_BLOCKS[0]))

    def candidates_of(pair: OffloadShare, product: OffloadShare, channels: int) -> Iterator[Candidate]:
        contraction = _product_bytes(fold, c, channels=channels, away=product.share) + pairs
        host, disk = room.split(pair.nbytes + product.nbytes, channels * pairs * e)
        if disk > room.disk:
            return
        on_disk = disk / max(1, pair.nbytes + product.nbytes)
        seconds = steps.templates.seconds(
            -(-c // channels), away=product.share, on_disk=on_disk * product.share
        )
        copies = template_copies(count, multimer=multimer) * steps.unit_copy * pair.share
        copies *= 1.0 + (steps.templates.disk - 1.0) * on_disk
        # The kept rows of the pair have separate memory, allocated before the rest is freed.
        stays = shard - pair.nbytes if pair.rows else 0
        for held, of_held in kept.items():
            working = of_held + one + max(contraction, joined, block)
            yield Candidate(
                held,
                max(stays, working - pair.nbytes),
                seconds * (1 if held else 2) + copies,
                host=host,
                disk=disk,
                settings={"pair": pair.kept, "product": product.kept, "channels": channels},
            )

    candidates = [
        candidate
        for pair in room.choices(fold.own, shard // fold.own)
        for product in room.choices(n, c * _product_width(fold) * e, used=pair.nbytes)
        for channels in channel_groups(c, fold.ranks, fold.device, fold.element_size)
        for candidate in candidates_of(pair, product, channels)
    ]
    return BlockedOperator("templates", resident, tuple(candidates), "kept")
