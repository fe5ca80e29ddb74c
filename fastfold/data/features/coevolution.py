"""Coevolution of residues in an alignment, as input of small networks.

Mean-field direct coupling analysis (Morcos et al. 2011, PNAS 108: E1293) computes a coupling matrix for every pair of
columns. Its Frobenius norm in the zero-sum gauge, corrected for the average product (Ekeberg et al. 2013, Phys. Rev. E
87: 012707; Dunn et al. 2008, Bioinformatics 24: 333), ranks pairs by their probability of a contact.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ml_collections import ConfigDict

from fastfold.data.features import transforms

FEATURES = ("coevolution_single", "coevolution_pair")  #: Names of the network's inputs

SINGLE_CHANNELS, PAIR_CHANNELS = 25, 4
"""Channels of the features ``coevolution_single`` and ``coevolution_pair``."""

MAX_RESIDUES = 1024
"""Largest number of residues for couplings, which take 1 GB with the most rows."""
MAX_ROWS = 4096  #: Number of analysed alignment rows, from the first

_SITES = 64  # columns whose couplings with all others exist at a time
_BLOCK = 512  # rows of a symmetric matrix that are computed at a time, up to the diagonal

_GAP, _STATES, _FREE = 20, 21, 20  # X counts as a gap; the gap's frequency follows from the others
_MIN_SEPARATION = 6  # closer pairs are excluded from the statistics

_log = logging.getLogger(__name__)


def is_input(config: ConfigDict) -> bool:
    """Return True if a configuration's network uses coevolution; none of the official ones does."""
    return bool(config.model.embeddings_and_evoformer.get("coevolution", False))


@dataclass(frozen=True, eq=False)
class Coevolution:
    """Coevolution in an alignment of ``N`` columns."""

    #: ``[N, N]`` float32, symmetric, zero on the diagonal; higher for pairs that vary together. None without
    #: couplings.
    scores: np.ndarray | None
    #: ``[N, 21]`` float32, frequencies of the 20 residue types and of gaps; each row sums to 1
    profile: np.ndarray
    #: ``[N]`` float32 in nats, from 0 (all residues equally frequent) to ln 20 (a single residue)
    conservation: np.ndarray
    #: Natural logarithm of the number of rows, where similar rows count as one together
    log_effective_rows: float


def analyze(msa: np.ndarray, *, identity: float = 0.8, couplings: bool = True) -> Coevolution:
    """Compute the profile and couplings of an alignment.

    The ``msa [S, N]`` has residue types 0-21 (20 is X, 21 a gap), row 0 is the query. Rows with gaps in at least half
    of the columns are left out, except the query. Rows that agree in a share of all columns larger than ``identity``
    share their weight. Without ``couplings``, most of the time is saved.
    """
    rows = np.minimum(msa[:MAX_ROWS], _GAP).astype(np.uint8)
    covered = (rows == _GAP).mean(axis=1) < 0.5
    covered[0] = True
    rows = rows[covered]
    count, length = rows.shape
    weights = torch.from_numpy(np.float32(1.0) / _similar_rows(rows, identity).astype(np.float32))
    effective = float(weights.sum())
    one_hot = torch.from_numpy(transforms.one_hot(rows, _FREE))  # a gap is zeros
    of_residues = (weights @ one_hot.view(count, -1)).view(length, _FREE)
    of_gaps = weights @ torch.from_numpy(rows == _GAP).float()
    # An additional half weight of the query keeps the profile of a shallow alignment near it.
    query = torch.from_numpy(transforms.one_hot(rows[0], _STATES))
    profile = (torch.cat([of_residues, of_gaps[:, None]], 1) + 0.5 * query) / (effective + 0.5)
    residues = profile[:, :_FREE] / profile[:, :_FREE].sum(dim=1, keepdim=True).clamp(min=1e-6)
    conservation = np.log(_FREE) + (residues * (residues + 1e-9).log()).sum(dim=1)
    scores = None
    if couplings and count > 1:
        if length <= MAX_RESIDUES:
            scores = coupling_scores(one_hot, weights)
        else:
            _log.warning("a chain of %d residues gets no couplings (at most %d)", length, MAX_RESIDUES)
    return Coevolution(scores, profile.numpy(), conservation.numpy(), float(np.log(effective)))


def _similar_rows(rows: np.ndarray, identity: float) -> np.ndarray:
    """Count for each row of ``[S, N]`` bytes the rows that agree with it in a larger share of columns, ``[S]``."""
    limit = np.float32(identity * rows.shape[1])
    numbers = np.zeros(len(rows), np.int64)
    for block in transforms.row_blocks(len(rows), _BLOCK):
        similar = transforms.equal_columns(rows[block], rows[block.start :]) > limit
        numbers[block] += similar.sum(axis=1)
        numbers[block.stop :] += similar[:, _BLOCK:].sum(axis=0)
    return numbers


def coupling_scores(
    one_hot: torch.Tensor, weights: torch.Tensor, *, pseudocount: float = 0.5, zero_sum: bool = True
) -> np.ndarray:
    """Compute mean-field couplings of all pairs of columns, as one score each.

    Columns are ``one_hot [S, N, 20]``, zeros for a gap, with ``weights [S]`` of the rows, float32. A share
    ``pseudocount`` of the frequencies, in (0, 1), is uniform. ``zero_sum`` shifts each coupling matrix to the gauge in
    which its rows and columns sum to zero. Otherwise its norm depends on the state that is left out.

    Returns:
        ``[N, N]`` float32, symmetric, zero on the diagonal.
    """
    length = one_hot.shape[1]
    deviations = _deviations(one_hot, weights / weights.sum(), pseudocount)
    is_deep = len(deviations) >= length * _FREE
    couplings = (_by_columns if is_deep else _by_rows)(deviations, pseudocount, zero_sum)
    norm = torch.zeros(length, length)
    for start in range(0, length, _SITES):  # the upper triangle
        stop = min(length, start + _SITES)
        block = couplings(slice(start * _FREE, stop * _FREE)).view(stop - start, _FREE, -1, _FREE)
        norm[start:stop, start:] = block.square().sum((1, 3)).sqrt()
    norm = norm.triu(1)
    norm = norm + norm.T  # bitwise symmetric, so that ranks are symmetric
    if length > 1:
        mean_of_column = norm.sum(0) / (length - 1)
        mean_of_all = norm.sum() / (length * (length - 1))
        norm = norm - mean_of_column[:, None] * mean_of_column[None, :] / mean_of_all.clamp(min=1e-12)
    return norm.fill_diagonal_(0).numpy()


# The covariance is A + VᵀV. A has the same block p/21 (I - 11ᵀ/21) for each column, with the share p of pseudocounts,
# and the inverse of a block is 21/p (I + 11ᵀ). Couplings are the blocks of the negative inverse covariance outside of
# the diagonal. The gauge multiplies a block by I - 11ᵀ/21 on both sides. The gap has zero couplings, and is excluded
# from norms, because gaps occur in runs.


def _deviations(one_hot: torch.Tensor, share: torch.Tensor, pseudocount: float) -> torch.Tensor:
    """Return V ``[S + 1, N, 20]``: the rows' deviations from the mean, and the mean's from equal frequencies."""
    count, *columns = one_hot.shape
    mean = (share @ one_hot.flatten(1)).view(columns)
    deviations = torch.empty(count + 1, *columns)
    torch.sub(one_hot, mean, out=deviations[:-1])
    deviations[:-1].mul_(((1 - pseudocount) * share).sqrt()[:, None, None])
    deviations[-1] = (mean - 1 / _STATES) * (pseudocount * (1 - pseudocount)) ** 0.5
    return deviations


def _gram(x: torch.Tensor) -> torch.Tensor:
    """Return the symmetric product ``x xᵀ`` of a matrix, from one triangle."""
    product = torch.empty(len(x), len(x))
    for block in transforms.row_blocks(len(x), _BLOCK):
        torch.mm(x[block], x[: block.stop].T, out=product[block, : block.stop])
        product[: block.start, block] = product[block, : block.start].T
    return product


Couplings = Callable[[slice], torch.Tensor]
"""Function from rows of the inverse covariance to these rows, from their first column on; signs may differ."""


def _by_rows(deviations: torch.Tensor, pseudocount: float, zero_sum: bool) -> Couplings:
    """Solve a system of the size of the alignment's rows (matrix inversion lemma).

    ``(A + VᵀV)⁻¹ = A⁻¹ - YᵀY`` with ``Y = L⁻¹ V A⁻¹`` and ``L Lᵀ = I + V A⁻¹ Vᵀ``.
    """
    scale, sums = _STATES / pseudocount, deviations.sum(2)
    flat = deviations.flatten(1)
    gram = scale * (_gram(flat) + _gram(sums))
    gram.diagonal().add_(1)
    if not zero_sum:  # the gauge leaves 21/p I of a block's inverse
        flat = (deviations + sums[..., None]).flatten(1)
    solved = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), flat, upper=False).mul_(scale)
    return lambda rows: solved[:, rows].T @ solved[:, rows.start :]


def _by_columns(deviations: torch.Tensor, pseudocount: float, zero_sum: bool) -> Couplings:
    """Invert the covariance itself, which takes less time for deep alignments of short chains."""
    _, length, states = deviations.shape
    covariance = _gram(deviations.flatten(1).T)
    every = torch.arange(length)
    own = pseudocount / _STATES * (torch.eye(states) - 1 / _STATES)
    covariance.view(length, states, length, states)[every, :, every, :] += own
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance))

    def couplings(rows: slice) -> torch.Tensor:
        block = inverse[rows, rows.start :].view(-1, states, length - rows.start // states, states)
        if zero_sum:
            block = block - block.sum(3, keepdim=True) / _STATES
            block = block - block.sum(1, keepdim=True) / _STATES
        return block.flatten(2).flatten(0, 1)

    return couplings


def features(coevolution: Coevolution | None, length: int) -> dict[str, np.ndarray]:
    """Compute the network's input from coevolution.

    Returns:
        ``coevolution_single [N, 25]``: profile, conservation, log of the effective rows, a flag for an alignment, and
        one for couplings. ``coevolution_pair [N, N, 4]``: the score in standard deviations, its rank, a flag, and the
        rank weighted by the effective rows. float32, zeros without an alignment or without couplings.
    """
    single = np.zeros((length, SINGLE_CHANNELS), np.float32)
    pair = np.zeros((length, length, PAIR_CHANNELS), np.float32)
    if coevolution is not None:
        single[:, :_STATES] = coevolution.profile
        single[:, _STATES] = coevolution.conservation / 2
        single[:, _STATES + 1] = coevolution.log_effective_rows / 4
        single[:, _STATES + 2] = 1
        if coevolution.scores is not None:
            single[:, _STATES + 3] = 1
            _fill_pair_features(pair, coevolution.scores, coevolution.log_effective_rows)
    return {"coevolution_single": single, "coevolution_pair": pair}


def _fill_pair_features(pair: np.ndarray, scores: np.ndarray, log_effective_rows: float) -> None:
    """Compute features ``pair [N, N, 4]`` from couplings ``scores [N, N]``; zeros for a short chain."""
    length = len(scores)
    position = np.arange(length)
    far = scores[np.abs(position[:, None] - position) >= _MIN_SEPARATION]
    if not len(far):
        return
    standard = (scores - far.mean()) / max(float(far.std()), 1e-6)
    # Number of pairs with a higher score, each pair counted once, as a multiple of the length.
    above = (len(far) - np.searchsorted(np.sort(far), scores, side="right")) / 2
    rank = np.clip(-np.log((above + 1) / length), -4, 4) / 2
    pair[..., 0] = np.clip(standard / 3, -2, 4)
    pair[..., 1] = rank
    pair[..., 2] = 1
    pair[..., 3] = rank * log_effective_rows / 5


def of_alignment(raw_msa: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the network's input from an alignment ``[S, N]`` in HHblits ids.

    The ids are those of :mod:`fastfold.data.features.raw`. A single row, the query, is not an alignment.
    """
    length = raw_msa.shape[1]
    if len(raw_msa) < 2:
        return features(None, length)
    # Seeds, networks and copies of a chain share an alignment.
    rows = transforms.to_restype_order(raw_msa[:MAX_ROWS])
    return {name: x.copy() for name, x in _of_rows(rows.tobytes(), length).items()}


@functools.lru_cache(maxsize=4)
def _of_rows(rows: bytes, length: int) -> dict[str, np.ndarray]:
    return features(analyze(np.frombuffer(rows, np.uint8).reshape(-1, length)), length)


def analyze_subset(raw_msa: np.ndarray, number: int) -> Coevolution:
    """Analyse random rows of ``raw_msa [S, N]``, HHblits ids, so that training varies the depth.

    Number 0 selects all rows; other numbers each select a random 30% to 100% of them.
    """
    rows = np.arange(len(raw_msa))
    if number:
        rng = np.random.default_rng([number, len(raw_msa)])
        kept = max(1, round(rng.uniform(0.3, 1.0) * (len(raw_msa) - 1)))
        rows = np.concatenate([[0], 1 + np.sort(rng.permutation(len(raw_msa) - 1)[:kept])])
    return analyze(transforms.to_restype_order(raw_msa[rows]))


def of_chains(raw_msas: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Compute the network's input from one alignment ``[S, N]`` per chain; pairs across chains are zero.

    Ids are those of :func:`of_alignment`, the result is that of :func:`features`, of all residues together.
    """
    per_chain = [of_alignment(msa) for msa in raw_msas]
    ends = np.cumsum([0, *(msa.shape[1] for msa in raw_msas)])
    pair = np.zeros((ends[-1], ends[-1], PAIR_CHANNELS), np.float32)
    for start, end, one in zip(ends, ends[1:], per_chain, strict=False):
        pair[start:end, start:end] = one["coevolution_pair"]
    return {
        "coevolution_single": np.concatenate([one["coevolution_single"] for one in per_chain]),
        "coevolution_pair": pair,
    }
