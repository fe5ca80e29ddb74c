"""Features of a complex for the multimer networks (AlphaFold-Multimer, Evans et al. 2021).

The official networks draw and cluster the alignment inside the network. Here the data code does, with the same three
stages as for one chain: :func:`prepare`, :func:`draw_rows` (or :func:`rows_in_order`) and :func:`cycle_features`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from ml_collections import ConfigDict

from fastfold.data.features import transforms
from fastfold.data.features.raw import Layout, check_ids, check_layout
from fastfold.data.features.transforms import Alignment, RandomDraw

_CHAIN_IDS = ("asym_id", "entity_id", "sym_id")
_LAYOUT: Layout = {
    "aatype": ("N",),
    "residue_index": ("N",),
    **dict.fromkeys(_CHAIN_IDS, ("N",)),
    "seq_mask": ("N",),
    "msa": ("S", "N"),
    "msa_mask": ("S", "N"),
    "deletion_matrix": ("S", "N"),
    "bert_mask": ("S", "N"),
    "cluster_bias_mask": ("S",),
}
_TEMPLATE_LAYOUT: Layout = {
    "template_aatype": ("T", "N"),
    "template_all_atom_positions": ("T", "N", 37, 3),
    "template_all_atom_mask": ("T", "N", 37),
}


def prepare(merged: Mapping[str, np.ndarray], config: ConfigDict) -> tuple[dict[str, np.ndarray], Alignment]:
    """Compute the features and the alignment that all recycling iterations share.

    Returns:
        The static features, and the alignment of ``S`` rows. Static features: ``aatype``, ``residue_index``,
        ``asym_id``, ``entity_id``, ``sym_id`` ``[N]`` int32, ``seq_mask`` ``[N]`` float32, ``target_feat``
        ``[N, 21]`` float32, the atom maps of :func:`fastfold.data.features.transforms.atom_maps`, and the templates
        (``template_aatype`` ``[T, N]`` int32, ``template_all_atom_positions`` ``[T, N, 37, 3]`` in Å,
        ``template_all_atom_mask`` ``[T, N, 37]``, and ``template_frame`` ``[T, N]`` int32 if given) if the network uses
        them.

    Raises:
        InputError: A merged feature is missing, or has an invalid shape or residue ids.
    """
    use_templates = config.model.embeddings_and_evoformer.template.enabled
    check_layout(merged, {**_LAYOUT, **(_TEMPLATE_LAYOUT if use_templates else {})})
    check_ids(merged, "aatype", 21)
    check_ids(merged, "msa", 22)
    aatype = np.asarray(merged["aatype"], np.int32)
    static = {
        "aatype": aatype,
        "residue_index": np.asarray(merged["residue_index"], np.int32),
        **{name: np.asarray(merged[name], np.int32) for name in _CHAIN_IDS},
        "seq_mask": np.asarray(merged["seq_mask"], np.float32),
        "target_feat": transforms.one_hot(aatype, 21),
        **transforms.atom_maps(aatype),
    }
    if use_templates:
        check_ids(merged, "template_aatype", 22)
        static |= {name: np.asarray(merged[name], np.float32) for name in _TEMPLATE_LAYOUT}
        static["template_aatype"] = np.asarray(merged["template_aatype"], np.int32)
        if "template_frame" in merged:
            check_layout(merged, {"template_aatype": ("T", "N"), "template_frame": ("T", "N")})
            static["template_frame"] = np.asarray(merged["template_frame"], np.int32)
    msa = np.asarray(merged["msa"], np.uint8)
    mask = np.asarray(merged["msa_mask"], np.float32)
    return static, Alignment(
        msa=msa,
        deletions=np.asarray(merged["deletion_matrix"], np.float32),
        mask=mask,
        bert_mask=np.asarray(merged["bert_mask"], np.float32),
        cluster_bias=np.asarray(merged["cluster_bias_mask"], np.float32),
        profile=transforms.msa_profile(msa, mask),
    )


def drop_padding(alignment: Alignment) -> Alignment:
    """Remove the rows that are wholly masked.

    The official pipeline pads to 512 rows for fixed shapes. Padded rows are drawn last and do not influence other rows,
    so their removal makes shallow alignments faster.
    """
    real = alignment.mask.any(axis=1)
    by_row = ("msa", "deletions", "mask", "bert_mask", "cluster_bias")
    return replace(alignment, **{name: getattr(alignment, name)[real] for name in by_row})


def draw_rows(rng: np.random.Generator, alignment: Alignment, config: ConfigDict) -> RandomDraw:
    """Draw the cluster centres, the extra rows and the masked positions.

    Rows whose ``cluster_bias`` is 1 come first (each chain's query, in random order), then the others uniformly without
    replacement, wholly masked ones last.
    """
    options = config.model.embeddings_and_evoformer
    rank = alignment.cluster_bias + alignment.mask.any(axis=1)
    shuffled = rng.permutation(len(rank))
    draw = rows_in_order(alignment, config, shuffled[np.argsort(-rank[shuffled], kind="stable")])
    mask = alignment.mask[draw.clusters] > 0
    masked = (rng.random(mask.shape) < options.masked_msa.replace_fraction) & mask
    msa = transforms.corrupt_msa(
        rng, alignment.msa[draw.clusters], masked, alignment.profile, options.masked_msa, epsilon=1e-6
    )
    return replace(draw, masked=masked, msa=np.where(mask, msa, 0).astype(np.uint8))


def rows_in_order(alignment: Alignment, config: ConfigDict, rows: np.ndarray | None = None) -> RandomDraw:
    """Take the first ``rows [S]`` as centres and the next as extra MSA, without masking; by default in order."""
    options = config.model.embeddings_and_evoformer
    rows = np.arange(len(alignment.msa)) if rows is None else rows
    clusters, extra = np.split(rows, [min(options.num_msa, len(rows))])
    mask = alignment.mask[clusters] > 0
    return RandomDraw(
        clusters=clusters,
        extra=extra,
        num_extra=min(options.num_extra_msa, len(extra)),
        masked=np.zeros(mask.shape, bool),
        msa=np.where(mask, alignment.msa[clusters], 0).astype(np.uint8),
    )


def summarize_clusters(alignment: Alignment, draw: RandomDraw) -> tuple[np.ndarray, np.ndarray]:
    """Compute profiles of the clusters with a soft assignment of the extra rows.

    An extra row belongs to the centre with the best agreement, and to several equally good ones in equal parts. This
    equals a softmax at inverse temperature 1,000 over whole numbers. As in the official code, the share is multiplied
    by the number of columns that both rows cover, and the centre itself counts once.

    Returns:
        Residue frequencies ``[C, N, 23]`` and mean deletion counts ``[C, N]`` of the clusters, float32.
    """
    center_mask, row_mask = alignment.mask[draw.clusters], alignment.mask[draw.extra]
    counts = transforms.one_hot(draw.msa, transforms.NUM_MSA_CLASSES) * center_mask[..., None]
    deletion_sum = alignment.deletions[draw.clusters]
    total = np.ones(len(draw.clusters), np.float32)
    if len(draw.extra):
        msa = alignment.msa[draw.extra]
        deletions = alignment.deletions[draw.extra] * row_mask
        score = transforms.agreement(draw.msa, center_mask, msa, row_mask)
        best = score == score.max(axis=1, keepdims=True)
        share = best / best.sum(axis=1, keepdims=True, dtype=np.float32)
        weight = share * (row_mask @ center_mask.T)  # [E, C]
        counts += _weighted_counts(weight, msa, row_mask)
        deletion_sum += weight.T @ deletions
        total += weight.sum(axis=0)
    return counts / total[:, None, None], deletion_sum / total[:, None]


def _weighted_counts(weight: np.ndarray, msa: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Count residues of the extra rows with weights ``[E, C]``, as ``[C, N, 23]`` float32.

    Most rows belong to one cluster and are counted directly, which is much faster than a product of one-hot codes. The
    product is used only for rows shared by several clusters.
    """
    classes = transforms.NUM_MSA_CLASSES
    length = msa.shape[1]
    visible = np.where(mask > 0, msa, classes)  # an additional class collects masked positions
    owners = (weight > 0).sum(axis=1)
    single = np.flatnonzero(owners == 1)
    owner = np.argmax(weight[single], axis=1)
    counts = np.zeros((weight.shape[1], length, classes), np.float32)
    for cluster in np.unique(owner):
        members = single[owner == cluster]
        counted = transforms.count_residues(visible[members], classes + 1, weight[members, cluster])
        counts[cluster] = counted[:, :classes]
    shared = np.flatnonzero(owners > 1)
    for rows in transforms.row_blocks(len(shared)):
        block = shared[rows]
        codes = transforms.one_hot(visible[block], classes).reshape(len(block), -1)
        counts += (weight[block].T @ codes).reshape(counts.shape)
    return counts


def cycle_features(alignment: Alignment, draw: RandomDraw, config: ConfigDict) -> dict[str, np.ndarray]:
    """Compute the features of one recycling iteration (:func:`.transforms.cluster_features`) from its draw.

    If ColabFold's ``use_cluster_profile`` is False in ``model.embeddings_and_evoformer``, residues and deletions of the
    centres take the place of those of the clusters.
    """
    if config.model.embeddings_and_evoformer.get("use_cluster_profile", True):
        profile, deletion_mean = summarize_clusters(alignment, draw)
    else:
        profile = transforms.one_hot(draw.msa, transforms.NUM_MSA_CLASSES)
        deletion_mean = alignment.deletions[draw.clusters]
    return transforms.cluster_features(alignment, draw, profile, deletion_mean)
