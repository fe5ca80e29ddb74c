"""Means of ``accuracy.py`` by the depth of the alignments, and their tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastfold.protein.metrics.contacts import CONTACT_SEPARATION, LONG_RANGE, MIN_CONTACTS
from fastfold.training.report.plots import calibrate
from fastfold.training.validation import DEEP_ROWS, ChainScore

DEPTHS: dict[str, tuple[int, float]] = {
    "all chains": (0, math.inf),
    "none": (0, 1),
    "1 row and more": (1, math.inf),
    "1 to 49": (1, 50),
    f"50 to {DEEP_ROWS - 1}": (50, DEEP_ROWS),
    f"{DEEP_ROWS} and more": (DEEP_ROWS, math.inf),
}
"""Groups of chains by rows of the alignment without the query, half-open."""

LENGTHS: dict[str, tuple[int, float]] = {
    "up to 100 residues": (0, 101),
    "101 to 160 residues": (101, 161),
    "161 residues and more": (161, math.inf),
}
"""Groups of chains by length, half-open."""

_INPUT, _STRUCTURE = "_input", "_structure"


@dataclass(frozen=True)
class Measured:
    """Measured chain.

    Attributes:
        score: Score of the network's fold.
        figures: Figures to average; missing figures are left out.
    """

    score: ChainScore
    figures: dict[str, float]


def summarize(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return the :func:`summary` of each group that has chains: by depth, and by depth and length."""
    groups = {
        name: [m for m in measured if low <= (m.score.depth or 0) < high]
        for name, (low, high) in DEPTHS.items()
    }
    for depth in ("none", "1 row and more"):
        for length, (low, high) in LENGTHS.items():
            groups[f"{depth}, {length}"] = [m for m in groups[depth] if low <= m.score.residues < high]
    return {name: summary(members) for name, members in groups.items() if members}


def summary(measured: Sequence[Measured]) -> dict[str, float]:
    """Average all figures over the chains that have them, and calibrate pLDDT over all residues.

    Figures of the input alone (``…_input``) are left out if a chain has the network's figure but not its input's: their
    means would be over other chains.
    """
    found: dict[str, float] = {"chains": len(measured)}
    for name in dict.fromkeys(name for m in measured for name in m.figures):
        values = [m.figures[name] for m in measured if name in m.figures]
        counterparts = sum(name.removesuffix(_INPUT) in m.figures for m in measured)
        if not name.endswith(_INPUT) or len(values) == counterparts:
            found[name] = statistics.fmean(values)
    for name in ("lddt_ca", "tm_score"):
        found[f"{name}_median"] = statistics.median(m.figures[name] for m in measured)
    found["above_bundle"] = statistics.fmean(
        m.figures["lddt_ca"] > m.figures["lddt_ca_bundle"] for m in measured
    )
    for name, extreme in (("radius_ratio", min), ("c_n_min", min), ("c_n_max", max)):
        values = [m.figures[name] for m in measured if name in m.figures]
        if values:
            found[name if name.startswith("c_n") else f"{name}_min"] = extreme(values)
    for suffix in ("", "_long"):
        found[f"contact_chains{suffix}"] = sum(f"base_rate{suffix}" in m.figures for m in measured)
    predicted, true = (
        np.concatenate([getattr(m.score, key) for m in measured]) for key in ("predicted", "true")
    )
    calibration = calibrate(predicted, true)
    return found | {
        "residues": calibration.residues,
        "plddt_pearson": calibration.pearson,
        "plddt_bias": calibration.bias,
        "plddt_calibration_error": calibration.error,
    }


# A table's heading, and its columns: title and format by figure.
_Table = tuple[str, dict[str, tuple[str, str]]]


def tables(groups: Mapping[str, Mapping[str, float]]) -> str:
    """Return Markdown tables of the groups of :func:`summarize`, one line each, without empty columns and tables."""
    known = {figure for group in groups.values() for figure in group}
    return "\n".join(
        _table(heading, columns, groups) for heading, columns in _TABLES if known & columns.keys()
    )


def _table(
    heading: str, columns: Mapping[str, tuple[str, str]], groups: Mapping[str, Mapping[str, float]]
) -> str:
    kept = {
        figure: column
        for figure, column in columns.items()
        if any(figure in group for group in groups.values())
    }
    rows = [["alignment", *(title for title, _ in kept.values())], ["---"] * (len(kept) + 1)]
    for name, group in groups.items():
        cells = (format(group[figure], form) if figure in group else "" for figure, (_, form) in kept.items())
        rows.append([name, *cells])
    return "\n".join([heading, "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def _contacts(separation: int, suffix: str) -> _Table:
    return (
        f"Precision of contacts, {separation} residues and more apart, in chains with {MIN_CONTACTS} of them:",
        {
            f"contact_chains{suffix}": ("chains", "d"),
            f"precision_l5{suffix}": ("L/5", ".3f"),
            f"precision_l5{suffix}{_STRUCTURE}": ("coordinates", ".3f"),
            f"precision_l5{suffix}{_INPUT}": ("input alone", ".3f"),
            f"precision_l2{suffix}": ("L/2", ".3f"),
            f"precision_l2{suffix}{_STRUCTURE}": ("coordinates", ".3f"),
            f"precision_l2{suffix}{_INPUT}": ("input alone", ".3f"),
            f"base_rate{suffix}": ("all pairs", ".3f"),
        },
    )


_TABLES: tuple[_Table, ...] = (
    (
        "Structures, with baselines that know nothing of the protein; pLDDT over residues:",
        {
            "chains": ("chains", "d"),
            "lddt_ca": ("lDDT-CA", ".3f"),
            "lddt_ca_bundle": ("bundle", ".3f"),
            "lddt_ca_helix": ("helix", ".3f"),
            "above_bundle": ("above the bundle", ".0%"),
            "tm_score": ("TM-score", ".3f"),
            "tm_score_bundle": ("bundle", ".3f"),
            "tm_score_helix": ("helix", ".3f"),
            "plddt_bias": ("pLDDT bias", "+.3f"),
            "plddt_pearson": ("pLDDT r", ".3f"),
        },
    ),
    (
        "Figures that a collapsed structure cannot pass; neighbours and clashes per residue:",
        {
            "own_minus_other": ("own minus other", "+.3f"),
            "radius_ratio": ("radius ratio", ".2f"),
            "radius_sane": ("0.7 to 1.3", ".0%"),
            "radius_ratio_min": ("smallest", ".2f"),
            "near_neighbours": ("near neighbours", ".3f"),
            "near_neighbours_true": ("experiment", ".3f"),
            "clashes": ("clashes", ".3f"),
        },
    ),
    (
        "Backbones, which experiments have too; of residues, bonds and chains:",
        {
            "phi_positive": ("phi above 0", ".1%"),
            "phi_positive_true": ("experiment", ".1%"),
            "alpha_beta": ("alpha and beta", ".1%"),
            "alpha_beta_true": ("experiment", ".1%"),
            "omega_off_planar": ("omega off by 30", ".2%"),
            "omega_off_planar_true": ("experiment", ".2%"),
            "c_n_near": ("C-N within 0.05 Å", ".2%"),
            "c_n_min": ("shortest", ".2f"),
            "c_n_max": ("longest", ".2f"),
            "ca_ca": ("CA-CA", ".2f"),
            "ca_ca_sd": ("deviation", ".3f"),
            "pierced": ("with a pierced ring", ".1%"),
        },
    ),
    (
        "The same after relaxation, and the share of chains without a violation and with a negative energy:",
        {
            "relaxed": ("relaxed", ".1%"),
            "phi_positive_relaxed": ("phi above 0", ".1%"),
            "alpha_beta_relaxed": ("alpha and beta", ".1%"),
            "omega_off_planar_relaxed": ("omega off by 30", ".2%"),
            "pierced_relaxed": ("with a pierced ring", ".1%"),
        },
    ),
    (
        "Cross-entropy of the distogram in nats, by separation in the sequence:",
        {
            "chains": ("chains", "d"),
            "distogram_ce_3_6": ("3 to 5", ".3f"),
            "distogram_ce_3_6_prior": ("prior", ".3f"),
            "distogram_ce_6_12": ("6 to 11", ".3f"),
            "distogram_ce_6_12_prior": ("prior", ".3f"),
            "distogram_ce_12_24": ("12 to 23", ".3f"),
            "distogram_ce_12_24_prior": ("prior", ".3f"),
            "distogram_ce_24_up": ("24 and more", ".3f"),
            "distogram_ce_24_up_prior": ("prior", ".3f"),
        },
    ),
    _contacts(CONTACT_SEPARATION, ""),
    _contacts(LONG_RANGE, "_long"),
)
