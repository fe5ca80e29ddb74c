"""Features of one chain for the monomer networks (AlphaFold supplement, section 1.2).

There are three stages. :func:`prepare` computes the features shared by all iterations, :func:`draw_rows` draws all
random numbers, and :func:`cycle_features` computes an iteration's features from a draw.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict

from fastfold.data.features import coevolution, transforms
from fastfold.data.features import raw as raw_features
from fastfold.data.features.raw import check_ids, check_layout
from fastfold.data.features.transforms import Alignment, RandomDraw


def prepare(raw: Mapping[str, np.ndarray], config: ConfigDict) -> tuple[dict[str, np.ndarray], Alignment]:
    """Compute the features and the alignment that all recycling iterations share.

    Returns:
        The static features, and the alignment of ``S`` rows in residue types. Static features: ``aatype``,
        ``residue_index`` ``[N]`` int32, ``seq_mask`` ``[N]`` float32, ``target_feat`` ``[N, 22]`` float32
        (domain break, residue one-hot), the atom maps of :func:`fastfold.data.features.transforms.atom_maps`, the
        templates and coevolution (:func:`fastfold.data.features.coevolution.features`) if the network uses them.
        Coevolution is given, or computed from the alignment.

    Raises:
        InputError: A raw feature is missing, or has an invalid shape or residue ids.
    """
    length = check_layout(raw, raw_features.SEQUENCE_LAYOUT | raw_features.MSA_LAYOUT)["N"]
    check_ids(raw, "msa", 22)
    aatype = np.argmax(raw["aatype"], axis=-1).astype(np.int32)
    has_break = np.clip(raw["between_segment_residues"], 0, 1).astype(np.float32)
    static = {
        "aatype": aatype,
        "residue_index": np.asarray(raw["residue_index"], np.int32),
        "seq_mask": np.ones(length, np.float32),
        "target_feat": np.concatenate([has_break[:, None], transforms.one_hot(aatype, 21)], axis=-1),
        **transforms.atom_maps(aatype),
    }
    if config.data.common.use_templates:
        static |= padded_templates(raw, length, config.data.eval.max_templates)
    if coevolution.is_input(config):
        ready = {key: raw[key] for key in coevolution.FEATURES if key in raw}
        static |= ready or coevolution.of_alignment(raw["msa"])
    msa = transforms.to_restype_order(raw["msa"])
    cluster_bias = np.zeros(len(msa), np.float32)
    cluster_bias[0] = 1.0
    ones = np.broadcast_to(np.float32(1.0), msa.shape)  # uses no memory
    deletions = np.asarray(raw["deletion_matrix_int"], np.float32)
    return static, Alignment(
        msa=msa,
        deletions=deletions,
        mask=ones,
        bert_mask=ones,
        cluster_bias=cluster_bias,
        profile=transforms.msa_profile(msa, ones),
    )


def padded_templates(raw: Mapping[str, np.ndarray], length: int, max_templates: int) -> dict[str, np.ndarray]:
    """Return the first ``max_templates`` templates, padded with zeros; ``template_mask`` marks real ones.

    Returns:
        ``template_aatype`` ``[T, N]`` int32, ``template_all_atom_positions`` ``[T, N, 37, 3]`` and
        ``template_pseudo_beta`` ``[T, N, 3]`` in Å, ``template_all_atom_masks`` ``[T, N, 37]``,
        ``template_pseudo_beta_mask`` ``[T, N]``, ``template_sum_probs`` ``[T, 1]``, ``template_mask``
        ``[T]``, float32.
    """
    templates = raw_features.template_features(raw, length)
    templates.pop("template_frame", None)  # the chains of a monomer network are one
    positions, masks = templates["template_all_atom_positions"], templates["template_all_atom_masks"]
    aatype = transforms.template_aatype(templates["template_aatype"])
    beta, beta_mask = transforms.pseudo_beta(aatype, positions, masks)
    features = templates | {
        "template_aatype": aatype,
        "template_pseudo_beta": beta,
        "template_pseudo_beta_mask": beta_mask,
        "template_mask": np.ones(len(aatype), np.float32),
    }
    return {name: transforms.pad_templates(value, max_templates) for name, value in features.items()}


def num_clusters(config: ConfigDict) -> int:
    """Return the number of cluster centres; templates use some of the rows in some presets."""
    template_rows = (
        config.data.eval.max_templates if config.data.common.reduce_msa_clusters_by_max_templates else 0
    )
    return config.data.eval.max_msa_clusters - template_rows


def draw_rows(rng: np.random.Generator, alignment: Alignment, config: ConfigDict) -> RandomDraw:
    """Draw the cluster centres, the masked positions and the extra rows (supplement, section 1.2.7).

    The query is always the first centre; other rows are drawn uniformly without replacement. The centres are masked
    before the other rows are assigned to clusters, so that clusters do not reveal masked residues.
    """
    rows = len(alignment.msa)
    order = np.concatenate([[0], 1 + rng.permutation(rows - 1)])
    clusters, extra = np.split(order, [min(num_clusters(config), rows)])
    masked = (
        rng.random((len(clusters), alignment.msa.shape[1])) < config.data.eval.masked_msa_replace_fraction
    )
    msa = transforms.corrupt_msa(
        rng, alignment.msa[clusters], masked, alignment.profile, config.data.common.masked_msa, epsilon=1e-10
    )
    num_extra = min(config.data.common.max_extra_msa, len(extra))
    return RandomDraw(clusters=clusters, extra=extra, num_extra=num_extra, masked=masked, msa=msa)


def summarize_clusters(alignment: Alignment, draw: RandomDraw) -> tuple[np.ndarray, np.ndarray]:
    """Assign each extra row to the centre with the most equal columns, the first of several.

    Returns:
        Residue frequencies ``[C, N, 23]`` and mean deletion counts ``[C, N]`` of the clusters including their centres
        (with masked residues as such), float32.
    """
    msa, deletions = alignment.msa[draw.extra], alignment.deletions[draw.extra]
    counts = transforms.one_hot(draw.msa, transforms.NUM_MSA_CLASSES)
    deletion_sum = alignment.deletions[draw.clusters]
    sizes = np.zeros(len(draw.clusters), np.float32)
    if len(draw.extra):
        score = transforms.agreement(draw.msa, alignment.mask[draw.clusters], msa, alignment.mask[draw.extra])
        assignment = np.argmax(score, axis=1)
        for cluster in np.unique(assignment):
            members = np.flatnonzero(assignment == cluster)
            counts[cluster] += transforms.count_residues(msa[members], transforms.NUM_MSA_CLASSES)
            deletion_sum[cluster] += deletions[members].sum(axis=0)
            sizes[cluster] = len(members)
    # AlphaFold's order of float32 additions, for equal rounding.
    total = np.float32(1e-6) + alignment.mask[draw.clusters] + sizes[:, None]
    return counts / total[..., None], deletion_sum / total


def cycle_features(alignment: Alignment, draw: RandomDraw) -> dict[str, np.ndarray]:
    """Compute the features of one recycling iteration from its draw.

    Returns:
        Features of :func:`fastfold.data.features.transforms.cluster_features`, ``msa_row_mask`` ``[C]`` and
        ``extra_msa_row_mask`` ``[E]`` float32.
    """
    features = transforms.cluster_features(alignment, draw, *summarize_clusters(alignment, draw))
    features["msa_row_mask"] = features["msa_mask"][:, 0]
    features["extra_msa_row_mask"] = features["extra_msa_mask"][:, 0]
    return features
