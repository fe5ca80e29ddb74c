"""Clusters of alignment rows by DBSCAN (AF_Cluster, Wayment-Steele et al., 2024, doi:10.1038/s41586-023-06832-9)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastfold.data.msa.msa import Msa
from fastfold.data.msa.sampling import row_letters
from fastfold.utils.packages import require_package

MAX_GAPS = 0.25  #: Rows with this share of gaps or more are left out
MIN_ROWS = 3  #: Smallest number of rows near a core row, itself included

_LETTERS = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY-", np.uint8)
_EPS = np.arange(3.0, 20.5, 0.5)
_SCANNED_SHARE = 0.25
_GIVE_UP_EPS = 10.0


class RowClusters(NamedTuple):
    """Clusters of the rows of an alignment."""

    eps: float  #: Radius of DBSCAN, the Euclidean distance of one-hot rows
    #: Rows of each cluster in increasing order, without the query; in the order of DBSCAN's labels
    rows: list[np.ndarray]


def cluster_rows(msa: Msa, rng: np.random.Generator | np.random.RandomState) -> RowClusters:
    """Cluster the rows below the query, with the radius that makes most clusters.

    For each radius from 3 to 20 in steps of 0.5, a random quarter of the rows is clustered. Noise counts as a cluster
    there. All rows are then clustered with the best radius, the smallest of several.

    Raises:
        ConfigError: The package scikit-learn is not installed.
    """
    require_package("scikit-learn", "--sample clusters")
    from sklearn.cluster import DBSCAN

    letters = row_letters(msa)
    # The query is in every sample, so it belongs to no cluster.
    candidates = 1 + np.flatnonzero((letters[1:] == ord("-")).mean(1) < MAX_GAPS)
    points = (letters[candidates][:, :, None] == _LETTERS).astype(np.float32).reshape(len(candidates), -1)
    quarter = round(_SCANNED_SHARE * len(points))
    if quarter == 0:
        return RowClusters(float(_EPS[0]), [])

    def labels(rows: np.ndarray, eps: float) -> np.ndarray:
        return DBSCAN(eps=eps, min_samples=MIN_ROWS).fit(rows).labels_

    counts: list[int] = []
    for eps in _EPS.tolist():
        chosen = rng.choice(len(points), size=quarter, replace=False)
        counts.append(len(set(labels(points[chosen], eps).tolist())))
        if eps > _GIVE_UP_EPS and counts[-1] == 1:
            break
    best = float(_EPS[int(np.argmax(counts))])
    found = labels(points, best)
    return RowClusters(best, [candidates[found == label] for label in range(found.max() + 1)])
