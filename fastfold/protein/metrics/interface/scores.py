"""Scores of a prediction's chains and pairs of chains, as plain numbers for JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastfold.protein.metrics.interface.pair_scores import (
    CONTACT_SCORES,
    PAE_CUTOFF,
    contact_points,
    directed_scores,
    interface_contacts,
)
from fastfold.protein.metrics.scores import LARGEST_OF_PAIRS, PAIR_SCORES
from fastfold.protein.protein import chain_name, check_shape, convert_arrays
from fastfold.utils.lazy import old_keywords

DISTANCE_CUTOFF = 15.0
"""``near_pairs`` counts residues nearer than this, in Å: the ipSAE program's setting for AlphaFold 2."""

_LARGER = tuple(one.key for one in PAIR_SCORES if one.directions == "larger")
_MEAN = tuple(one.key for one in PAIR_SCORES if one.directions == "mean")

MAX_CLASHING_ATOMS = 100
MAX_CLASHING_SHARE = 0.5
"""Chains with more clashing atoms clash, AlphaFold 3's rule (Abramson et al. 2024, supplement, section 5.9.2)."""


@dataclass(frozen=True, eq=False)
class ChainConfidence:
    """Confidence in ``C`` chains from a network's logits, which cannot be computed from the aligned error.

    Raises:
        ValueError: Shapes disagree, or only one of both actifpTM is given.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.metrics.interface import ChainConfidence
        >>> confidence = ChainConfidence(ptm=np.array([0.8, 0.7]), iptm=np.array([[0.0, 0.6], [0.6, 0.0]]))
        >>> confidence.iptm.max().item()
        0.6
    """

    ptm: np.ndarray  #: ``[C]`` float64, pTM of each chain, 0 to 1
    iptm: np.ndarray  #: ``[C, C]`` float64, ipTM of each pair of chains; the diagonal has no meaning
    #: ``[C, C]`` float64, actifpTM of each pair; None without a distogram
    pair_actifptm: np.ndarray | None = None
    actifptm: float | None = None  #: actifpTM of all interfaces; None without a distogram

    def __post_init__(self) -> None:
        chains = len(self.ptm)
        convert_arrays(self, {"ptm": (np.float64, (chains,)), "iptm": (np.float64, (chains, chains))})
        if self.pair_actifptm is not None:
            convert_arrays(self, {"pair_actifptm": (np.float64, (chains, chains))})
        if (self.pair_actifptm is None) != (self.actifptm is None):
            raise ValueError("ChainConfidence needs both actifptm and pair_actifptm, or neither")
        if self.actifptm is not None:
            object.__setattr__(self, "actifptm", float(self.actifptm))


def pair_keys(names: Sequence[str]) -> dict[tuple[int, int], str]:
    """Return the key of each ordered pair of chains in files: their names with a dash, ``A-B``.

    If that gives two pairs one key, as for the chains ``a`` and ``a-a``, a space takes the place of the dash.

    Example:
        >>> from fastfold.protein.metrics.interface.scores import pair_keys
        >>> pair_keys(["A", "b-1"])
        {(0, 1): 'A-b-1', (1, 0): 'b-1-A'}
    """
    places = list(itertools.permutations(range(len(names)), 2))
    dashed, spaced = ([f"{names[i]}{sign}{names[j]}" for i, j in places] for sign in "- ")
    return dict(zip(places, dashed if len(set(dashed)) == len(places) else spaced, strict=True))


def interface_scores(
    chain_index: np.ndarray,
    atom_positions: np.ndarray,
    atom_mask: np.ndarray,
    plddt: np.ndarray,
    *,
    pae: np.ndarray | None = None,
    confidence: ChainConfidence | None = None,
    names: Sequence[str] | None = None,
    pae_cutoff: float = PAE_CUTOFF,
    distance_cutoff: float = DISTANCE_CUTOFF,
) -> dict[str, Any]:
    """Compute scores of a prediction's chains and of every pair of chains.

    Undefined scores are None: scores of the aligned error without ``pae``, scores of the logits without
    ``confidence``, means over contacts of chains that do not touch, and maxima over no pairs. By their definitions
    ipSAE and LIS are 0 without an error under the cutoff, and pDockQ and pDockQ2 without a contact.
    Clashes are None for a single chain. Scores of errors that are NaN are NaN. Positions have the three decimals of
    files, pLDDT and aligned errors the two, so that other programs compute the same scores.

    Args:
        chain_index: ``[N]`` int: 0, ..., 0, 1, ..., 1, and so on.
        atom_positions: ``[N, 37, 3]`` in Å.
        atom_mask: ``[N, 37]``, 1 for present atoms; residues without CA and CB touch nothing.
        plddt: ``[N]``, 0 to 100.
        pae: ``[N, N]`` in Å, error at residue j when aligned on i.
        confidence: The network's confidence in the chains.
        names: Names of the chains; by default A, B, and so on.
        pae_cutoff: Aligned errors under this count for ipSAE, in Å.
        distance_cutoff: ``near_pairs`` counts residues nearer than this, in Å.

    Returns:
        Numbers, None, lists and dictionaries: ``pae_cutoff``, ``distance_cutoff``, ``actifptm``, ``ipsae_max``,
        ``clashes`` and ``has_clash`` of the whole, ``chains`` by name and ``pairs`` by :func:`pair_keys` such as
        ``A-B``. A pair's scores are symmetric: of both directions the larger one or the mean, by
        :mod:`fastfold.protein.metrics.scores`. ``directions`` holds the scores of each direction (``B-A``: aligned on
        B, scored on A). ``docs/scores.md`` explains each score.

    Raises:
        ValueError: Shapes disagree, residues of a chain are apart, or names are not those of the chains.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.metrics.interface import interface_scores
        >>> chains, present = np.array([0] * 5 + [1] * 5), np.ones((10, 37))
        >>> positions = np.random.default_rng(0).normal(size=(10, 37, 3))
        >>> scores = interface_scores(chains, positions, present, np.full(10, 80.0), pae=np.full((10, 10), 5.0))
        >>> list(scores["chains"]), list(scores["pairs"]), scores["has_clash"]
        (['A', 'B'], ['A-B'], True)
    """
    n = len(chain_index)
    atom_positions, atom_mask = np.asarray(atom_positions), np.asarray(atom_mask)
    pae = None if pae is None else np.asarray(pae)
    shapes = {"atom_positions": (n, 37, 3), "atom_mask": (n, 37), "plddt": (n,), "pae": (n, n)}
    arrays = {"atom_positions": atom_positions, "atom_mask": atom_mask, "plddt": plddt, "pae": pae}
    for name, value in arrays.items():
        check_shape(name, value, shapes[name])
    borders = [0, *(np.flatnonzero(np.diff(chain_index)) + 1).tolist(), n]
    rows = [slice(start, stop) for start, stop in itertools.pairwise(borders)]
    if n == 0 or len(np.unique(chain_index)) != len(rows):
        raise ValueError(
            "chain_index must have all residues of a chain in a row: 0, ..., 0, 1, ..., 1, and so on"
        )
    names = [chain_name(number) for number in range(len(rows))] if names is None else list(names)
    if len(names) != len(rows) or len(set(names)) != len(rows):
        raise ValueError(f"names must be {len(rows)} different ones, one for each chain, found {names}")
    if confidence is not None and len(confidence.ptm) != len(rows):
        raise ValueError(
            f"confidence has {len(confidence.ptm)} chains, expected {len(rows)} as in chain_index"
        )
    plddt = np.round(np.asarray(plddt, np.float64), 2)
    chains: dict[str, dict[str, Any]] = {
        name: {
            "residues": part.stop - part.start,
            "mean_plddt": float(plddt[part].mean()),
            "ptm": None if confidence is None else float(confidence.ptm[number]),
        }
        for number, (name, part) in enumerate(zip(names, rows, strict=True))
    }
    clashes = None
    overlaps: dict[str, Any] = {"clashes": None, "has_clash": None}
    if len(rows) > 1:
        clashes, clashing_atoms, has_clash = _count_clashes(chain_index, atom_positions, atom_mask)
        overlaps = {"clashes": int(clashes.sum()) // 2, "has_clash": has_clash}
        for chain, atoms in zip(chains.values(), clashing_atoms.tolist(), strict=True):
            chain["clashing_atoms"] = atoms
    points = contact_points(atom_positions, atom_mask)
    keys = pair_keys(names)
    pairs: dict[str, Any] = {}
    for i, j in itertools.combinations(range(len(rows)), 2):
        own: dict[str, Any] = {"iptm": None, "actifptm": None}
        if confidence is not None:
            own["iptm"] = float(confidence.iptm[i, j])
            if confidence.pair_actifptm is not None:
                own["actifptm"] = float(confidence.pair_actifptm[i, j])
        own["clashes"] = None if clashes is None else int(clashes[i, j])
        both = rows[i], rows[j]
        pairs[keys[i, j]] = own | _pair(
            (keys[i, j], keys[j, i]),
            points=[points[part] for part in both],
            plddt=[plddt[part] for part in both],
            pae=None if pae is None else [pae[both], pae[both[::-1]]],
            cutoffs=(pae_cutoff, distance_cutoff),
        )
    return {
        "pae_cutoff": float(pae_cutoff),
        "distance_cutoff": float(distance_cutoff),
        "actifptm": None if confidence is None or not pairs else confidence.actifptm,
        **{
            name: _largest([pair[key] for pair in pairs.values() if pair[key] is not None])
            for name, key in LARGEST_OF_PAIRS.items()
        },
        **overlaps,
        "chains": chains,
        "pairs": pairs,
    }


@old_keywords({"found": "scores"})
def without_scores(scores: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return :func:`interface_scores` with None for every score of a pair of chains; clashes stay.

    The reason says why the scores would be wrong.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.metrics.interface import interface_scores, without_scores
        >>> chains, present = np.array([0] * 5 + [1] * 5), np.ones((10, 37))
        >>> positions = np.random.default_rng(0).normal(size=(10, 37, 3))
        >>> scores = interface_scores(chains, positions, present, np.full(10, 80.0), pae=np.full((10, 10), 5.0))
        >>> hidden = without_scores(scores, "the network was trained on single chains")
        >>> scores["ipsae_max"] is None, hidden["ipsae_max"] is None
        (False, True)
    """

    def empty(tree: dict[str, Any]) -> dict[str, Any]:
        return {key: empty(value) if isinstance(value, dict) else None for key, value in tree.items()}

    pairs = {name: empty(pair) | {"clashes": pair["clashes"]} for name, pair in scores["pairs"].items()}
    whole = dict.fromkeys(("actifptm", *LARGEST_OF_PAIRS))
    return scores | {"reason": reason} | whole | {"pairs": pairs}


def _largest(values: Sequence[float]) -> float | None:
    """Return the largest value, NaN if one is NaN, or None without any."""
    return float(np.max(values)) if len(values) else None


def _count_clashes(
    chain_index: np.ndarray, atom_positions: np.ndarray, atom_mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Count clashes between ``C`` chains of positions as structure files hold them.

    Returns:
        Pairs of atoms ``[C, C]`` int that overlap, atoms ``[C]`` int of each chain within 1.1 Å of another chain, and
        True if a chain has too many of these.
    """
    import torch  # slow to import, and needed here alone

    from fastfold.protein.metrics.lddt import chain_clashes

    numbers = np.cumsum(np.diff(chain_index, prepend=chain_index[0]) != 0)
    mask = np.asarray(atom_mask, np.float32)
    positions = np.round(np.asarray(atom_positions, np.float64), 3)
    counted = chain_clashes(*map(torch.from_numpy, (positions, mask, numbers)))
    pairs, atoms = (counts.numpy() for counts in counted)
    sizes = np.bincount(numbers, weights=(mask > 0.5).sum(1))
    too_many = (atoms > MAX_CLASHING_ATOMS) | (atoms > MAX_CLASHING_SHARE * sizes)
    return pairs, atoms, bool(too_many.any())


def _pair(
    keys: tuple[str, str],
    *,
    points: list[np.ndarray],
    plddt: list[np.ndarray],
    pae: list[np.ndarray] | None,
    cutoffs: tuple[float, float],
) -> dict[str, Any]:
    """Compute the scores of two chains that do not need logits, from arrays of both; ``pae`` has both directions."""
    contacts = interface_contacts(*points)
    pair_scores: dict[str, Any] = {
        "contacts": len(contacts),
        "interface_residues": [len(np.unique(contacts.first)), len(np.unique(contacts.second))],
        "interface_plddt": contacts.interface_plddt(*plddt),
        "pdockq": contacts.pdockq(*plddt),
    }
    if pae is None:
        return pair_scores | dict.fromkeys((*_LARGER, *_MEAN)) | {"directions": None}
    near = interface_contacts(*points, distance=math.nextafter(cutoffs[1], 0.0))
    directions: dict[str, dict[str, Any]] = {}
    for key, errors, touching, close, turn in (
        (keys[0], pae[0], contacts, near, 1),
        (keys[1], pae[1], contacts.turned(), near.turned(), -1),
    ):
        first, second = plddt[::turn]
        errors = np.round(np.asarray(errors, np.float64), 2)
        both = errors[close.first, close.second] < cutoffs[0]
        scores = directed_scores(errors, cutoff=cutoffs[0])
        directions[key] = {
            "ipsae": scores.ipsae_d0res,
            "ipsae_d0chn": scores.ipsae_d0chn,
            "ipsae_d0dom": scores.ipsae_d0dom,
            "iptm_d0chn": scores.iptm_d0chn,
            "lis": scores.lis,
            "n0res": scores.n0res,
            "n0chn": scores.n0chn,
            "n0dom": scores.n0dom,
            "d0res": scores.d0res,
            "d0chn": scores.d0chn,
            "d0dom": scores.d0dom,
            "pairs": scores.num_pairs,
            "residues": [scores.aligned_residues, scores.scored_residues],
            "near_pairs": int(both.sum()),
            "near_residues": [len(np.unique(side[both])) for side in (close.first, close.second)],
            **{key: compute(touching, first, second, errors) for key, compute in CONTACT_SCORES.items()},
        }
    there, back = directions.values()
    both_ways = {key: (there[key], back[key]) for key in (*_LARGER, *_MEAN) if there[key] is not None}
    pair_scores |= {key: _largest(both_ways.get(key, ())) for key in _LARGER}
    pair_scores |= {key: sum(both_ways[key]) / 2.0 if key in both_ways else None for key in _MEAN}
    return pair_scores | {"directions": directions}
