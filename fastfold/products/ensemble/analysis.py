"""Compare the structures of an ensemble: scores of all pairs, clusters, components, fluctuations, and states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fastfold.inference.sampling.settings import SIMILARITY
from fastfold.products.ensemble.members import Ensemble
from fastfold.protein.io.observed import COMPARISON, read_logged
from fastfold.protein.labels import default_names
from fastfold.protein.metrics.chain_mapping import ChainCandidates, map_chains
from fastfold.protein.metrics.compare import compare_structures
from fastfold.protein.metrics.tm_score import rmsd, superpose, tm_score
from fastfold.protein.protein import Protein

NUM_COMPONENTS = 5  #: Largest number of principal components
_ROUNDS = 20


@dataclass(frozen=True)
class EnsembleState:
    """Agreement of an ensemble's ``M`` structures with a given state, by the name of its file.

    TM-scores ``[M]`` are normalised by the state's length, and RMSDs ``[M]`` in Å are over the common CA atoms.
    """

    name: str
    tm_score: np.ndarray
    rmsd: np.ndarray
    #: For each structure, the chains in its files with their chains of the state
    chain_mapping: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Analysis:
    """Analysis of ``M`` structures with ``K`` residues that have a CA atom in all of them."""

    tm_score: np.ndarray  #: ``[M, M]``, symmetric
    rmsd: np.ndarray  #: ``[M, M]`` in Å over CA atoms, symmetric
    clusters: np.ndarray  #: ``[M]`` integers from 1, the largest cluster first
    representatives: tuple[int, ...]  #: Per cluster, its member with the largest mean TM-score to the others
    superposed: np.ndarray  #: ``[M, K, 3]`` in Å, CA atoms superposed on their mean
    components: np.ndarray  #: ``[M, C]`` in Å, coordinates of the structures along the principal components
    variance: np.ndarray  #: ``[C]``, share of the variance of each component
    fluctuation: np.ndarray  #: ``[K]`` in Å, root mean square fluctuation of each residue (RMSF)
    states: tuple[EnsembleState, ...] = ()  #: Agreement with given states


def analyze(
    ensemble: Ensemble,
    *,
    similarity: float = SIMILARITY,
    num_clusters: int | None = None,
    references: Sequence[Path] = (),
) -> Analysis:
    """Analyse an ensemble by scikit-learn; an InputError names a reference that cannot be read or compared.

    Clusters are joined while the mean TM-score of their pairs is at least ``similarity``, or down to ``num_clusters``.
    ``references`` are structure files of known states.
    """
    scores, distances = pairwise_scores(ensemble.ca, ensemble.copies)
    clusters = cluster_structures(scores, similarity=similarity, num_clusters=num_clusters)
    superposed = superpose_on_mean(ensemble.ca)
    components, variance = principal_components(superposed)
    deviations = superposed - superposed.mean(0)
    return Analysis(
        tm_score=scores,
        rmsd=distances,
        clusters=clusters,
        representatives=representatives(scores, clusters),
        superposed=superposed,
        components=components,
        variance=variance,
        fluctuation=np.sqrt(np.square(deviations).sum(-1).mean(0)),
        states=tuple(_compare(ensemble, path) for path in references),
    )


def pairwise_scores(ca: np.ndarray, copies: ChainCandidates | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Compute TM-scores and RMSDs ``[M, M]`` in Å of all pairs of structures ``[M, K, 3]`` in Å with the same residues.

    TM-scores are from the quick search of :func:`fastfold.protein.metrics.tm_score.tm_score`. Chains of ``copies`` are
    exchanged in each pair for the largest TM-score; None for none.
    """
    points = torch.from_numpy(ca)
    number, mask = len(ca), torch.ones(ca.shape[1], dtype=torch.float64)
    scores, distances = np.eye(number), np.zeros((number, number))
    for i in range(number):
        others = points[i + 1 :]
        if copies is not None and copies.count > 1:
            others = others.clone()
            for other in others:
                mapping = map_chains(copies, other, points[i], mask, mask)
                here, there = torch.from_numpy(copies.rows(mapping)).unbind(-1)
                other[there] = other[here]
        rmsds = rmsd(others, points[i].expand_as(others), mask.expand(len(others), -1))
        distances[i, i + 1 :] = distances[i + 1 :, i] = rmsds.numpy()
        for j in range(i + 1, number):
            scores[i, j] = scores[j, i] = tm_score(others[j - i - 1], points[i], mask, quick=True)
    return scores, distances


def cluster_structures(
    scores: np.ndarray, *, similarity: float = SIMILARITY, num_clusters: int | None = None
) -> np.ndarray:
    """Cluster structures hierarchically by average linkage of ``1 - TM``; arguments as those of :func:`analyze`.

    The numbers ``[M]`` count from 1, the largest cluster first, and ties are in the order of the structures.
    """
    from sklearn.cluster import AgglomerativeClustering

    limit = np.nextafter(1.0 - similarity, 2.0) if num_clusters is None else None
    model = AgglomerativeClustering(
        n_clusters=num_clusters, distance_threshold=limit, metric="precomputed", linkage="average"
    )
    labels = model.fit(1.0 - scores).labels_
    sizes, first = np.bincount(labels), [int(np.flatnonzero(labels == k)[0]) for k in range(labels.max() + 1)]
    order = sorted(range(len(sizes)), key=lambda k: (-sizes[k], first[k]))
    return 1 + np.argsort(order)[labels]


def representatives(scores: np.ndarray, clusters: np.ndarray) -> tuple[int, ...]:
    """Return each cluster's member with the largest mean TM-score ``[M, M]`` to its cluster."""
    chosen = []
    for number in range(1, int(clusters.max()) + 1):
        members = np.flatnonzero(clusters == number)
        chosen.append(int(members[np.argmax(scores[np.ix_(members, members)].mean(1))]))
    return tuple(chosen)


def superpose_on_mean(ca: np.ndarray) -> np.ndarray:
    """Superpose structures ``[M, K, 3]`` in Å on their mean until it is stable.

    The mean is centered, and its longest axis is x, its shortest z.
    """
    points = torch.from_numpy(ca).double()
    mean, weights = points[0], torch.ones(points.shape[:2], dtype=torch.float64)
    for _ in range(_ROUNDS):
        points = superpose(points, mean.expand_as(points), weights)[..., None].apply(points)
        updated = points.mean(0)
        change, mean = float((updated - mean).abs().max()), updated
        if change < 1e-6:
            break
    superposed = points.numpy()
    center = superposed.mean((0, 1))
    axes = np.linalg.svd(superposed.mean(0) - center, full_matrices=True)[2]
    axes[2] *= np.linalg.det(axes)
    return (superposed - center) @ axes.T


def principal_components(superposed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute at most five principal components of superposed CA positions ``[M, K, 3]`` in Å.

    Coordinates are ``[M, C]`` in Å (root mean square over residues), and shares of the variance ``[C]``.
    """
    from sklearn.decomposition import PCA

    flat = superposed.reshape(len(superposed), -1)
    number = min(NUM_COMPONENTS, len(flat) - 1, flat.shape[1])
    if np.ptp(flat, axis=0).max() < 1e-9:  # equal structures span no direction
        return np.zeros((len(flat), number)), np.zeros(number)
    model = PCA(number, svd_solver="full")
    return model.fit_transform(flat) / np.sqrt(superposed.shape[1]), model.explained_variance_ratio_


def motion_onto_mean(ensemble: Ensemble, analysis: Analysis, member: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rotation ``[3, 3]`` and translation ``[3]`` in Å of a structure onto the mean of its ensemble."""
    ca, target = ensemble.ca[member], analysis.superposed[member]
    motion = superpose(torch.from_numpy(ca), torch.from_numpy(target), torch.ones(len(ca)))
    return motion.rotation.numpy(), motion.translation.numpy()


def superposed_protein(ensemble: Ensemble, analysis: Analysis, member: int) -> Protein:
    """Return a structure with all atoms, superposed on the mean of the ensemble."""
    protein = ensemble.members[member].protein
    rotation, translation = motion_onto_mean(ensemble, analysis, member)
    return replace(protein, atom_positions=protein.atom_positions @ rotation.T + translation)


def _compare(ensemble: Ensemble, path: Path) -> EnsembleState:
    state = read_logged(path, COMPARISON, whole=True)
    own = default_names(ensemble.members[0].protein).chain_ids
    comparisons = [compare_structures(member.protein, state) for member in ensemble.members]
    scores, distances = [one.tm_score for one in comparisons], [one.rmsd_ca for one in comparisons]
    chains = [
        {member.chains[own.index(ours)]: theirs for ours, theirs in one.chain_mapping.items()}
        for member, one in zip(ensemble.members, comparisons, strict=True)
    ]
    return EnsembleState(path.name, np.array(scores), np.array(distances), tuple(chains))
