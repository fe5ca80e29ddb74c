"""Collect the details of one prediction for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastfold.inference.output.file_names import ARCHIVE
from fastfold.inference.output.score_files import is_number, map_floats, mapping_of, scored_names
from fastfold.inference.report.about import rows_of_alignments
from fastfold.inference.report.discover import FoundPrediction, is_regular, leaving_out, read_json
from fastfold.inference.report.encode import pack_json
from fastfold.inference.report.references import reference_of
from fastfold.inference.report.verdict import verdict_of
from fastfold.protein.metrics.interface.scores import pair_keys
from fastfold.protein.metrics.scores import SCORES

_MOST_RESTRAINTS = 2000
_LONGEST_LINE = 100
_LONGEST_REASON = 1000
_OF_FORCED = ("threshold", "residues", "within", "rmsd", "largest_deviation")
_OF_PAIR = tuple(one.key for one in SCORES if one.covers == "pair")


def detail_of(
    prediction: FoundPrediction, folder: Path, say: Callable[[str], None], *, with_settings: bool
) -> dict[str, Any]:
    """Return everything about a prediction but its structure and aligned error, in JSON's types.

    ``say`` gets a line about each part that is left out. Without ``with_settings``, settings and coverage are None.
    """
    scores = prediction.scores
    archive = folder / f"{prediction.target}{ARCHIVE}"
    paths = [*prediction.files.values(), *([archive] if is_regular(archive) else [])]
    detail = {
        "name": scores["name"],
        "sequences": scores["sequences"],
        "ranges": scores.get("residue_ranges"),
        "chain_ids": list(scored_names(scores).chain_ids),
        "labels": scores.get("residue_labels"),
        "plddt": [round(float(value), 1) for value in scores["plddt"]],
        "interfaces": _interfaces(scores),
        **_relaxation(prediction),
        "geometry": _geometry(scores),
        "templates": _finite(scores.get("templates")),
        "forced": _forced(scores),
        "verdict": verdict_of(scores),
        "restraints": None,
        "reference": reference_of(prediction, say),
        "files": sorted(path.relative_to(folder).as_posix() for path in paths),
        "config": None,
        "coverage": None,
    }
    with leaving_out(f"{prediction.stem}: restraints", say):
        detail["restraints"] = restraints_of(scores)
    for key in ("config", "coverage") if with_settings else ():
        if (path := prediction.files.get(f"_{key}.json")) is None:
            continue
        with leaving_out(path.name, say):
            value = read_json(path)
            if not isinstance(value, dict) or (key == "coverage" and not _is_coverage(value, scores)):
                raise ValueError("its content does not match its name")
            pack_json(value := _finite(value))  # an error here leaves out only this file
            detail[key] = value
    detail["alignment_rows"] = rows_of_alignments(detail["config"])
    return detail


def _interfaces(scores: Mapping[str, Any]) -> dict[str, Any]:
    interfaces = mapping_of(scores, "interfaces")
    ids, of_pairs = scored_names(scores).chain_ids, mapping_of(interfaces, "pairs")
    pairs = {
        f"{ids[i]}\N{EN DASH}{ids[j]}": {key: pair[key] for key in _OF_PAIR if is_number(pair.get(key))}
        for (i, j), name in pair_keys(ids).items()
        if isinstance(pair := of_pairs.get(name), dict)
    }
    shown = {key: interfaces[key] for key in ("actifptm", "has_clash", "reason") if key in interfaces}
    return _finite({**shown, "pairs": pairs})


def _forced(scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = scores.get("forced_templates")
    return [
        {key: str(one.get(key, ""))[:_LONGEST_LINE] for key in ("chain", "name")}
        | {key: one[key] for key in _OF_FORCED if is_number(one.get(key))}
        for one in (entries if isinstance(entries, list) else [])
        if isinstance(one, dict)
    ]


def _geometry(scores: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the check of a structure's geometry from its scores; None if it is missing or does not fit them."""
    geometry = _finite(mapping_of(scores, "geometry"))
    lists = {key: geometry.get(key) for key in ("phi", "psi", "regions")}
    problems = geometry.get("problems")
    if not (isinstance(problems, list) and all(isinstance(one, str) for one in problems)):
        return None
    if not all(isinstance(one, list) and len(one) == len(scores["plddt"]) for one in lists.values()):
        return None
    if not all(x is None or is_number(x) for one in lists.values() for x in one):
        return None
    figures = {key: x for key, x in geometry.items() if is_number(x)}
    whole = {key: [None if x is None else round(x) for x in one] for key, one in lists.items()}
    return {"figures": figures, "problems": [one[:_LONGEST_REASON] for one in problems[:20]], **whole}


def restraints_of(scores: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the restraints of a scores file, cut to the page's size, None without any, or raise ValueError."""
    if (entry := scores.get("restraints")) is None:
        return None
    residues = len(scores["plddt"])
    try:
        rows = [_restraint(one, residues) for one in entry["restraints"][:_MOST_RESTRAINTS]]
        counts = {key: int(entry[key]) for key in ("satisfied_before", "satisfied", "total", "steps")}
        summary = {
            name: None if entry[name] is None else _number(entry[name])
            for name in ("confidence_paid", "evidence", "satisfied_left_out")
            if name in entry
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("its restraints have another form") from error
    flags = {name: entry[name] is True for name in ("leave_one_out", "doubtful") if name in entry}
    return {**counts, **summary, **flags, "restraints": rows}


def _restraint(entry: Any, residues: int) -> dict[str, Any]:
    places = [int(number) for number in entry["residues"]]
    if len(places) != 2 or not all(1 <= place <= residues for place in places):
        raise ValueError
    row: dict[str, Any] = {"residues": places, "holds": entry["holds"] is True}
    row |= {key: str(entry[key])[:_LONGEST_LINE] for key in ("line", "group")}
    row |= {key: _number(entry[key]) for key in ("min", "distance_before", "distance")}
    row["max"] = None if entry["max"] is None else _number(entry["max"])
    if "atoms" in entry:  # files of earlier versions are about CA
        row |= {"atoms": str(entry["atoms"])[:_LONGEST_LINE], "pairs": int(entry["pairs"])}
    if "probability" in entry:
        row |= {key: _number(entry[key]) for key in ("probability", "usual_probability")}
    if "contradicts" in entry:
        row["contradicts"] = [str(line)[:_LONGEST_LINE] for line in entry["contradicts"][:_MOST_RESTRAINTS]]
        row |= {
            key: _number(entry[key]) for key in ("plddt_gain_without", "distance_without") if key in entry
        }
    return row


def _number(value: Any) -> float:
    """Return a finite number, or raise ValueError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _relaxation(prediction: FoundPrediction) -> dict[str, Any]:
    """Return if the page's structure is relaxed according to its record, and the reason if not."""
    record = mapping_of(prediction.scores, "relaxation")
    outcome = record.get("relaxed")
    is_minimized = prediction.has_relaxed_structure
    not_relaxed = None
    if outcome is False:
        not_relaxed = str(record.get("reason") or "no reason is recorded")[:_LONGEST_REASON]
    elif is_minimized and outcome is not True:
        not_relaxed = "a record of its relaxation is missing from the scores file"
    return {"relaxed": is_minimized and outcome is True, "not_relaxed": not_relaxed}


def _is_coverage(value: Mapping[str, Any], scores: Mapping[str, Any]) -> bool:
    lengths = [len(sequence) for sequence in scores["sequences"]]
    depth, edges = value.get("depth_by_identity"), value.get("identity_edges")
    return (
        value.get("chain_lengths") == lengths
        and isinstance(edges, list)
        and isinstance(depth, list)
        and len(depth) == len(edges) - 1
        and all(isinstance(one, list) and len(one) == sum(lengths) for one in depth)
        and all(is_number(number) for number in (*edges, *(x for one in depth for x in one)))
        and isinstance(value.get("rows"), list)
    )


def _finite(value: Any) -> Any:
    """Replace floats that are not finite with None, because JSON cannot represent them."""
    return map_floats(value, lambda number: number if is_number(number) else None)
