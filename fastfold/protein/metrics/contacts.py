"""Scores of a distogram against a known structure: cross-entropy by separation, and precision of contacts.

Distances are those of the distogram loss: between Cβ atoms, Cα for glycine. A pair of residues counts once, if both
are resolved. Its separation ``j - i`` is counted in residues of the sequence, not by residue numbers of the file,
where a gap may be a naming convention or an unresolved loop.

Distograms and score matrices are symmetric: the upper triangle is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BANDS = {"3_6": (3, 6), "6_12": (6, 12), "12_24": (12, 24), "24_up": (24, math.inf)}
"""Half-open bands of separation by name: helices, turns and hairpins, and two bands of tertiary structure."""

CONTACT_DISTANCE = 8.0  #: Residues touch if they are under this distance, in Å

CONTACT_SEPARATION, LONG_RANGE = 12, 24  #: Minimum separations of scored contacts, and of long-range contacts

MIN_CONTACTS = 5
"""Structures with fewer contacts get no precision, which would describe them rather than the scores."""


@dataclass(frozen=True)
class ContactPrecision:
    """Share of contacts among the pairs with the highest scores, 0 to 1."""

    l5: float  #: Share among the best L/5 pairs, where L is the number of resolved residues
    l2: float  #: Share among the best L/2
    base_rate: float  #: Share among all pairs: the precision of a random choice


@dataclass(frozen=True)
class DistogramScore:
    """Scores of a distogram against a structure."""

    #: Cross-entropy in nats per pair, by the names of :data:`BANDS`; bands without pairs are left out
    cross_entropy: dict[str, float]
    #: Precision from :data:`CONTACT_SEPARATION` residues on; None for a structure with few contacts
    contacts: ContactPrecision | None
    #: Precision from :data:`LONG_RANGE` residues on; None for a structure with few such contacts
    long_range: ContactPrecision | None


def score_distogram(
    logits: np.ndarray, edges: np.ndarray, beta: np.ndarray, mask: np.ndarray
) -> DistogramScore:
    """Compare a distogram with a structure.

    The logits are ``[N, N, bins]``, the edges of the bins ``[bins - 1]`` in Å, the Cβ positions (Cα for glycine) ``[N,
    3]`` in Å, and the mask ``[N]`` is 1 for resolved atoms.
    """
    scores = contact_probabilities(logits, edges)
    return DistogramScore(
        cross_entropy=distogram_cross_entropy(logits, edges, beta, mask),
        contacts=contact_precision(scores, beta, mask, CONTACT_SEPARATION),
        long_range=contact_precision(scores, beta, mask, LONG_RANGE),
    )


def distogram_cross_entropy(
    logits: np.ndarray, edges: np.ndarray, beta: np.ndarray, mask: np.ndarray
) -> dict[str, float]:
    """Return the mean cross-entropy of the true distances in nats per pair, for each of :data:`BANDS`.

    Arguments as of :func:`score_distogram`; bands without pairs are left out.
    """
    i, j = _resolved_pairs(mask, min(low for low, _ in BANDS.values()))
    chosen = logits[i, j]  # [pairs, bins]
    peak = chosen.max(-1, keepdims=True)
    log_total = np.log(np.exp(chosen - peak).sum(-1)) + peak[:, 0]
    true = np.take_along_axis(chosen, _bins(_distances(beta, i, j), edges)[:, None], -1)[:, 0]
    nats = (log_total - true).astype(np.float64)
    in_bands = {name: nats[(j - i >= low) & (j - i < high)] for name, (low, high) in BANDS.items()}
    return {name: float(x.mean()) for name, x in in_bands.items() if len(x)}


def contact_probabilities(
    logits: np.ndarray, edges: np.ndarray, distance: float = CONTACT_DISTANCE
) -> np.ndarray:
    """Return the probabilities ``[N, N]`` of being under a distance.

    The bin with the distance counts by its part below the distance.

    Args:
        logits: ``[N, N, bins]``.
        edges: ``[bins - 1]`` in Å, the first one under the distance and the last one above.
        distance: Largest distance of a contact, in Å.
    """
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return sum_contact_bins(weights, edges, distance) / weights.sum(-1)


def sum_contact_bins(
    probabilities: np.ndarray, edges: np.ndarray, distance: float = CONTACT_DISTANCE
) -> np.ndarray:
    """Sum the bins ``[N, N]`` under a distance of ``probabilities [N, N, bins]``; see :func:`contact_probabilities`."""
    below = np.clip((distance - edges[:-1]) / np.diff(edges), 0.0, 1.0)
    return probabilities @ np.concatenate([[1.0], below, [0.0]]).astype(probabilities.dtype)  # [bins]


def contact_precision(
    scores: np.ndarray, beta: np.ndarray, mask: np.ndarray, min_separation: int = CONTACT_SEPARATION
) -> ContactPrecision | None:
    """Return the share of contacts among the pairs with the highest ``scores [N, N]``, or None.

    The share is None for a structure with fewer than :data:`MIN_CONTACTS` contacts of that separation. Structure and
    mask are those of :func:`score_distogram`.
    """
    i, j = _resolved_pairs(mask, min_separation)
    contact = _distances(beta, i, j) < CONTACT_DISTANCE
    if contact.sum() < MIN_CONTACTS:
        return None
    best_first = contact[np.argsort(-scores[i, j], kind="stable")]
    length = int((np.asarray(mask) > 0.5).sum())
    l5, l2 = (float(best_first[: max(1, length // part)].mean()) for part in (5, 2))
    return ContactPrecision(l5, l2, float(contact.mean()))


def _resolved_pairs(mask: np.ndarray, min_separation: int) -> tuple[np.ndarray, np.ndarray]:
    """Return resolved residues ``i`` and ``j``, both ``[pairs]``, with ``j - i >= min_separation``."""
    i, j = np.triu_indices(len(mask), min_separation)
    resolved = np.asarray(mask) > 0.5
    kept = resolved[i] & resolved[j]
    return i[kept], j[kept]


def _distances(points: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(points[i] - points[j]).sum(-1))


def _bins(distances: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return bins as in the loss: an edge belongs to the bin below it."""
    return np.searchsorted(edges, distances)
