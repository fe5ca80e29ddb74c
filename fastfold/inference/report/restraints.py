"""Restraints of a prediction for the page, from a scores file that may come from anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MOST = 2000
_LONGEST_NAME = 100


def restraints_of(scores: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the restraints of a scores file, cut to the page's size, None without any, or raise ValueError."""
    if (given := scores.get("restraints")) is None:
        return None
    residues = len(scores["plddt"])
    try:
        rows = [_row(one, residues) for one in given["restraints"][:_MOST]]
        counts = {key: int(given[key]) for key in ("satisfied_before", "satisfied", "total", "steps")}
        paid = _number(given["confidence_paid"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("its restraints have another form") from error
    found = {"confidence_paid": paid, "leave_one_out": given.get("leave_one_out") is True}
    return {**counts, **found, "restraints": rows}


def _row(given: Any, residues: int) -> dict[str, Any]:
    places = [int(number) for number in given["residues"]]
    if len(places) != 2 or not all(1 <= place <= residues for place in places):
        raise ValueError
    row: dict[str, Any] = {"residues": places, "holds": given["holds"] is True}
    row |= {key: str(given[key])[:_LONGEST_NAME] for key in ("line", "group")}
    row |= {key: _number(given[key]) for key in ("min", "distance_before", "distance")}
    row["max"] = None if given["max"] is None else _number(given["max"])
    if "contradicts" in given:
        row["contradicts"] = [str(line)[:_LONGEST_NAME] for line in given["contradicts"][:_MOST]]
        row["plddt_gain_without"] = _number(given["plddt_gain_without"])
    return row


def _number(value: Any) -> float:
    """Return a finite number, or raise ValueError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number
