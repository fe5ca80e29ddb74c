"""Table of designs with the figures of their folds, and the filters that each one failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastfold.inference.models import Network, suitable
from fastfold.inference.report.discover import FoundPrediction
from fastfold.inference.report.interfaces import parse_condition
from fastfold.products.design.agreement import BACKBONE, MOTIF, RING
from fastfold.products.design.limits import Limits, net_charge
from fastfold.products.design.results.design import Design
from fastfold.products.design.results.filters import FROM_DESIGN, Filter
from fastfold.products.design.results.folds import Figures, alone_figures, fold_figures, mean_figure
from fastfold.protein.geometry import MAX_PEPTIDE_BOND

PASSED = "passed"  #: Verdict of a design that passes all filters

COLUMNS = (
    "name", "sequence", "steps", "loss", "program_score", "design_plddt", "folds", "plddt", "ptm", "iptm", "i_pae",
    "dsasa", "sc", "hbonds", "rmsd", "backbone_rmsd", "motif_rmsd", "seqid", "ring_gap", "binder_rmsd", "binder_plddt",
    "target_iptm", "off_iptm", "charge", "chains", "hotspots", "kept", "filters", "note",
)  # fmt: skip


def design_rows(
    designs: Sequence[Design],
    predictions: Sequence[FoundPrediction],
    networks: Sequence[Network],
    filters: Sequence[Filter] = (),
    limits: Limits | None = None,
    where: str | None = None,
) -> list[dict[str, Any]]:
    """Return a row per design: those that pass all filters first, then by the confidence of the best fold.

    ``predictions`` are those of the designs, the best of each first. Confidence is 0.8 ipTM + 0.2 pTM of complexes,
    and pLDDT of single chains. ``where`` is a condition on
    :data:`COLUMNS` that designs have to meet as well; a ConfigError tells that it is not understood.
    """
    meets = None if where is None else parse_condition(where, COLUMNS)
    folds: dict[str, list[FoundPrediction]] = {}
    for one in predictions:
        folds.setdefault(one.scores["name"], []).append(one)
    rows = [_row(design, folds, networks, filters, limits) for design in designs]
    if meets is not None:
        for row in rows:
            failed = [row["filters"]] if row["filters"] not in ("", PASSED) else []
            if not meets({column: _value(row.get(column)) for column in COLUMNS}):
                failed.append(f"not {where}")
            row["filters"] = "; ".join(failed) or PASSED
    return sorted_rows(rows)


def sorted_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in the order of the table: those that pass all filters first, then by confidence."""
    return sorted(rows, key=lambda row: (row["filters"] not in ("", PASSED), -_confidence(row)))


def failed_filters(verdict: str) -> set[str]:
    """Return the names of the filters that a row's ``filters`` says were failed.

    A condition on columns is one of them, as it was given.
    """
    parts = [] if verdict in ("", PASSED) else verdict.split("; ")
    return {part if part.startswith("not ") else part.rpartition(": ")[2].split(" ")[0] for part in parts}


def _value(cell: Any) -> float | str | None:
    """Return a cell as a number where it is one; None for an empty one."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell or None


def _confidence(row: Mapping[str, Any]) -> float:
    if row.get("iptm") and row.get("ptm"):
        return 80 * float(row["iptm"]) + 20 * float(row["ptm"])
    return float(row.get("plddt") or 0.0)


def _row(
    design: Design,
    folds: Mapping[str, Sequence[FoundPrediction]],
    networks: Sequence[Network],
    filters: Sequence[Filter],
    limits: Limits | None,
) -> dict[str, Any]:
    state = design.state
    loss = state.best_loss if math.isfinite(state.best_loss) else state.log[-1]["loss"]
    row: dict[str, Any] = {
        "name": design.name,
        "sequence": ":".join(design.sequences),
        "steps": state.step,
        "charge": f"{net_charge(design.designed):+.0f}",
        "filters": "",
        "folds": len(folds.get(design.name, ())),
        **design.task.residue_columns,
    }
    if design.is_external:
        row["program_score"] = "" if design.score is None else f"{design.score:.4f}"
    else:
        row |= {"loss": f"{loss:.4f}", "design_plddt": f"{float(state.plddt.mean()):.2f}"}
    figures = {
        name: [(one.scores["model"], _figures(design, name, one)) for one in folds.get(name, ())]
        for name in design.complexes
    }
    if figures[design.name]:
        row |= _cells(folds[design.name][0], figures[design.name][0][1])

    for column, prefix, figure, worst, digits in (
        ("binder_rmsd", "_alone", "Binder_RMSD", max, 2),
        ("binder_plddt", "_alone", "Binder_pLDDT", max, 3),
        ("target_iptm", "_target_", "i_pTM", min, 3),
        ("off_iptm", "_off_", "i_pTM", max, 3),
    ):
        own = [folded for name, folded in figures.items() if name.startswith(f"{design.name}{prefix}")]
        means = [mean_figure([one for _, one in folded], figure) for folded in own]
        if known := [value for value in means if value is not None]:
            row[column] = f"{worst(known):.{digits}f}"
    notes = [] if limits is None else limits.broken(design.designed)
    if (problem := open_ring(row)) is not None:
        notes.append(problem)
    if design.is_given_up:
        reason = f": {state.log[-1]['reason']}" if "reason" in state.log[-1] else ""
        notes.append(f"given up after step {state.step}{reason}")
    if filters:
        row["filters"] = "; ".join(_failures(design, figures, networks, filters)) or PASSED
    return row | {"note": "; ".join(notes)}


def _figures(design: Design, name: str, fold: FoundPrediction) -> Figures:
    task, positions = design.complexes[name], design.state.positions
    if name == f"{design.name}_alone":
        return alone_figures(fold, task, positions[design.task.in_designed])
    return fold_figures(fold, task, positions if name == design.name else None)


def _failures(
    design: Design,
    figures: Mapping[str, Sequence[tuple[str, Figures]]],
    networks: Sequence[Network],
    filters: Sequence[Filter],
) -> list[str]:
    """Return the filters that a design fails with any of its targets or off-targets, in words."""
    failures = []
    for name, folds in figures.items():
        folding = [network.name for network in suitable(networks, design.complexes[name].target)]
        by_network = {network: [one for model, one in folds if model == network] for network in folding}
        is_off = name.startswith(f"{design.name}_off_")
        rest = name.removeprefix(design.name).strip("_").replace("_", " ")
        for one in filters:
            if one.is_off != is_off or (one.figure in FROM_DESIGN and name != design.name):
                continue
            if one.is_alone != (rest == "alone"):
                continue
            if text := one.failure(by_network):
                failures.append(f"{rest}: {text}" if rest and not one.is_alone else text)
    return failures


def _cells(best: FoundPrediction, figures: Figures) -> dict[str, str]:
    plddt = [float(value) for value in best.scores["plddt"]]
    cells = {"plddt": f"{sum(plddt) / len(plddt):.2f}"}
    columns = (
        *(("ptm", "pTM", 3), ("iptm", "i_pTM", 3), ("i_pae", "i_pAE", 3), ("rmsd", "RMSD", 2)),
        *(("dsasa", "dSASA", 0), ("sc", "ShapeComplementarity", 3), ("hbonds", "n_InterfaceHbonds", 0)),
        *((name, name, 3 if name == "seqid" else 2) for name in (*BACKBONE, *MOTIF, *RING)),
    )
    for column, name, digits in columns:
        if (value := figures.get(name)) is not None:
            cells[column] = f"{value:.{digits}f}"
    return cells


def open_ring(row: Mapping[str, Any]) -> str | None:
    """Return in words that a row's ring is not closed; None if it is, or for another design."""
    gap = row.get("ring_gap")
    if gap is None or float(gap) <= MAX_PEPTIDE_BOND:
        return None
    return f"the ring is not closed: {gap} Å from C of its last residue to N of its first"
