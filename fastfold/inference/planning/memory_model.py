"""What every step of a fold holds in memory, and in which ways it can be run.

Each function counts the tensors that live at once in one step, as the code of :mod:`fastfold.evoformer` makes them.
``U``, the size of the pair tensor, is what all the rest is small against in a long target.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastfold.evoformer.config import ensemble_size, is_multimer
from fastfold.inference.planning.time_model import Costs, StepTimes
from fastfold.kernels.ops.triangle_multiplication.contraction import contraction_bytes
from fastfold.memory.autochunk import Candidate, Operator

# PyTorch's own buffers and those of the operators' own blocks, of 4 MiB of float32 or less; and the gaps that blocks
# leave in the heap, in blocks (fewer where blocks are in float32 anyway). Not the program itself, whose code and
# threads take some 400 MiB after its first fold.
_FIXED_CPU, _GAPS_CPU, _GAPS_EXACT = 40 << 20, 5, 3
# Bytes per row and residue: of the raw alignment (on the host), of a cluster's and of an extra row's features.
_RAW, _CLUSTER_FEATURES, _EXTRA_FEATURES = 12, 220, 40
# That of a multimer has two masks instead of one value for all.
_RAW_MULTIMER = 13
# Of a cluster's, what stays to the end of a cycle (row masks, masked rows).
_CLUSTER_REST = 12
# Bytes per pair of residues in a block: distances, bins and one-hot rows on the way to an embedding; scores of points.
_EMBEDDING, _TEMPLATE_FEATURES, _POINTS = 64, 1200, 160

Before = Callable[[int], int]
"""Elements of a block to bytes."""

FIXED_CUDA = 768 << 20
"""Bytes of a GPU that plans leave to the driver's context, PyTorch's workspaces, and gaps."""

CUDA_BLOCK = 1 << 27
"""Elements of the largest block of attention on a GPU: 2^17 positions with 1,024 channels in all."""
MAX_BLOCK = 1 << 22
"""Elements of the largest blocks that rows are cut into: larger ones gain nothing."""
TEMPLATE_BLOCK = 1 << 20
"""Elements of the blocks in which templates are embedded."""


@dataclass(frozen=True)
class Fold:
    """Sizes of one fold.

    Attributes:
        residues: N, all chains together.
        element_size: Bytes per element of the trunk (4 for float32, 2 for bfloat16).
        clusters: Rows of the MSA.
        extra: Rows of the extra MSA.
        templates: Templates that are shown to the network.
        rows: Rows of all alignments.
        parameters: Bytes of the parameters.
        device: ``cpu`` or ``cuda``.
    """

    residues: int
    element_size: int
    clusters: int
    extra: int
    templates: int
    rows: int
    parameters: int
    device: str


def fold_sizes(
    config: Any,
    residues: int,
    *,
    element_size: int,
    alignment_rows: int | None = None,
    templates: int | None = None,
    parameters: int = 0,
    device: str = "cpu",
) -> Fold:
    """Sizes of a fold by a network; None for as many rows and templates as it takes."""
    c = config.model.embeddings_and_evoformer
    if is_multimer(config):
        most_clusters, most_extra = c.num_msa, c.num_extra_msa
    else:
        most_clusters, most_extra = config.data.eval.max_msa_clusters, config.data.common.max_extra_msa
    most_templates = c.template.max_templates if c.template.enabled else 0
    if templates is None or is_multimer(config):
        # The multimer network embeds empty templates too.
        templates = most_templates
    rows = most_clusters + most_extra if alignment_rows is None else max(1, alignment_rows)
    clusters = min(rows, most_clusters)
    extra = min(max(1, rows - clusters), most_extra)
    return Fold(
        residues, element_size, clusters, extra, min(templates, most_templates), rows, parameters, device
    )


def pair_bytes(config: Any, fold: Fold) -> int:
    """U: bytes of the pair tensor."""
    channels: int = config.model.embeddings_and_evoformer.pair_channel
    return fold.residues**2 * channels * fold.element_size


def row_elements(config: Any, fold: Fold) -> dict[str, int]:
    """Elements that one row has in each step that is cut in rows."""
    c = config.model.embeddings_and_evoformer
    n = fold.residues
    names = ("embedding", "outer product mean", "triangle attention", "structure module")
    columns = max(fold.extra * c.extra_msa_channel, (fold.clusters + fold.templates) * c.msa_channel)
    bins = config.model.heads.predicted_aligned_error.num_bins
    return dict.fromkeys(names, n * c.pair_channel) | {"MSA attention": columns, "heads": n * bins}


def operators(config: Any, fold: Fold, costs: Costs, *, host: bool) -> list[Operator]:
    """Every step of a fold that can be the largest, with the candidates for running it.

    Args:
        config: Official configuration tree.
        fold: Sizes.
        costs: What the candidates cost.
        host: Whether something may wait in the host's memory.
    """
    c = config.model.embeddings_and_evoformer
    n, e, pairs = fold.residues, fold.element_size, fold.residues**2
    unit, mask = pair_bytes(config, fold), pairs * e
    fixed = _FIXED_CPU + fold.rows * n * (_RAW_MULTIMER if is_multimer(config) else _RAW)
    if fold.device == "cuda":
        fixed = FIXED_CUDA + CUDA_BLOCK * e
    msa_rows = fold.clusters + fold.templates
    msa = msa_rows * n * c.msa_channel * e
    extra_features, extra = fold.extra * n * _EXTRA_FEATURES, fold.extra * n * c.extra_msa_channel * e
    features = fold.clusters * n * _CLUSTER_FEATURES + extra_features
    # Of an ensemble: the pair before the cycle, from which each member starts, the sum of those that are done, and the
    # features of those to come.
    members = ensemble_size(config)
    ensemble = (min(members, 3) - 1) * unit + (members - 1) * features
    always = fixed + fold.parameters + unit + mask + ensemble
    steps, row = costs.of(config, fold), row_elements(config, fold)

    def cut(
        name: str, resident: int, per_element: float, constant: int = 0, before: Before = lambda _: 0
    ) -> Operator:
        """A step cut in blocks of rows, which take ``per_element`` bytes for each element, or more ``before`` that."""
        gaps = 0
        if fold.device == "cpu":
            gaps = (_GAPS_EXACT if name in ("embedding", "structure module") else _GAPS_CPU) * e
        sizes = [max(1, min(n, MAX_BLOCK // row[name]) >> k) for k in range(24)]
        candidates = tuple(
            Candidate(
                size,
                max(before(size * row[name]), constant + int(per_element * size * row[name]))
                + gaps * size * row[name],
                steps.work[name] + steps.per_block[name] * -(-n // size),
            )
            for size in dict.fromkeys(sizes)
        )
        return Operator(name, resident, candidates, "rows")

    embedding = max(5 * e + _EMBEDDING / c.pair_channel, 14)
    found = [
        cut(
            "embedding",
            always + msa + features,
            embedding,
        )
    ]
    heads = c.evoformer.msa_row_attention_with_pair_bias.num_head
    masks = (fold.extra + msa_rows) * n * e
    in_stack = always + msa + extra + masks + fold.clusters * n * _CLUSTER_REST
    found.append(cut("MSA attention", in_stack, 4 * e, heads * pairs * e))
    side = c.evoformer.outer_product_mean.num_outer_channel * n * e
    stacks = ((fold.extra, c.extra_msa_channel), (msa_rows, c.msa_channel))

    depth = max(fold.extra, msa_rows)
    deepest, exact_mask = depth * side, 4 * depth * n

    def preparation(elements: int) -> int:
        """The right side and its mask, with a block of the MSA normalised and projected."""
        return exact_mask + max(
            rows * side + min(elements, rows * n * width) * e + min(rows, elements // (n * width)) * side
            for rows, width in stacks
        )

    # For the rows of a block: the MSA normalised (later, on a CPU, the left side once more), the left side, its mask,
    # and the norm of each pair.
    normalised = max(rows * width for rows, width in stacks) * e
    per_element = (8 * n + normalised + (deepest + exact_mask) / n) / row["outer product mean"]
    found.append(cut("outer product mean", in_stack, per_element, deepest + exact_mask, preparation))
    heads = c.evoformer.triangle_attention_starting_node.num_head
    found.append(cut("triangle attention", in_stack, 0.5 * e, 2 * heads * pairs * e))
    places = (False, True) if host else (False,)
    found.append(_multiplication(config, fold, steps, in_stack, places))
    if fold.templates:
        found.append(_templates(config, fold, steps, always + msa + extra_features, places))
    structure = config.model.heads.structure_module
    per_pair = 4 * (3 * c.pair_channel + 6 * structure.num_head) + _POINTS
    trunk_done = always - mask - ensemble + n * 4 * 8 * (structure.num_channel + 8 * 14 * 3)
    found.append(cut("structure module", trunk_done, per_pair / c.pair_channel))
    found.append(cut("heads", trunk_done, 4 * 3, 2 * 4 * pairs))
    return found


def channel_groups(channels: int) -> list[int]:
    """How many channels at a time a triangle multiplication can be given, the fastest first."""
    most = max(1, channels // 4)
    return [most >> k for k in range(most.bit_length())]


def _multiplication(
    config: Any, fold: Fold, steps: StepTimes, resident: int, places: Sequence[bool]
) -> Operator:
    """Triangle multiplication in groups of channels, with the product here (False) or on the host (True)."""
    evoformer = config.model.embeddings_and_evoformer.evoformer
    n, e = fold.residues, fold.element_size
    c = evoformer.triangle_multiplication_outgoing.num_intermediate_channel
    candidates = tuple(
        Candidate(
            channels,
            contraction_bytes(n, c, e, channels=channels, streamed=streamed) + n * n,
            steps.trunk.seconds(-(-c // channels), streamed=streamed),
            host=n * n * c * e if streamed else 0,
            settings={"streamed": streamed},
        )
        for streamed in places
        for channels in channel_groups(c)
    )
    return Operator("triangle multiplication", resident, candidates, "channels")


def _templates(config: Any, fold: Fold, steps: StepTimes, resident: int, places: Sequence[bool]) -> Operator:
    """Templates: all embedded ones held (size 1), or each embedded twice (size 0), in groups of channels.

    The products of their triangle multiplications may wait on the host, and so may the pair: its memory on the device
    is free meanwhile, and each template reads it on the host.
    """
    template = config.model.embeddings_and_evoformer.template
    n, e, pairs, count = fold.residues, fold.element_size, fold.residues**2, fold.templates
    multimer = is_multimer(config)
    stack = template.template_pair_stack
    c = template.num_channels if multimer else stack.triangle_attention_ending_node.value_dim
    one, unit = pairs * c * e, pair_bytes(config, fold)
    block = min(TEMPLATE_BLOCK, pairs * 128) // 128 * _TEMPLATE_FEATURES
    # In addition to the template that is embedded: the sum of those before, or their scores, and those that are held.
    scores = 0 if multimer else 4 * count * template.attention.num_head * pairs
    kept = {1: one if multimer else (count - 1) * one + scores}
    if not multimer and count > 1:
        kept[0] = scores
    candidates = []
    for held, offloaded, streamed in itertools.product(kept, places, places):
        for channels in channel_groups(c):
            working = one + contraction_bytes(n, c, e, channels=channels, streamed=streamed) + pairs + block
            seconds = steps.templates.seconds(-(-c // channels), streamed=streamed) * (1 if held else 2)
            if offloaded:
                seconds += (2 + count * (1 if multimer else 3)) * steps.unit_copy
            candidates.append(
                Candidate(
                    held,
                    max(0, kept[held] + working - (unit if offloaded else 0)),
                    seconds,
                    host=(unit if offloaded else 0) + (one if streamed else 0),
                    settings={"offloaded": offloaded, "streamed": streamed, "channels": channels},
                )
            )
    return Operator("templates", resident, tuple(candidates), "kept")
