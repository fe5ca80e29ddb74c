"""Statistics of trajectories, and acceptance by filter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastfold.products.design.results.table import PASSED, failed_filters

STATISTIC_COLUMNS = ("kind", "name", "count", "of", "share")


def statistic_rows(ended: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return counts of trajectories, sequences and failed filters.

    Args:
        ended: Stage after which each trajectory was given up; empty for those that were folded.
        rows: Rows of the table of designs.

    Returns:
        Rows of :data:`STATISTIC_COLUMNS`: ``trajectory`` (``finished``, ``given up after <stage>``, ``folded``),
        ``sequence`` (``folded``, ``accepted``), and ``filter`` with the folded sequences that pass each one. A
        sequence may fail several.
    """
    counts = [("trajectory", "finished", len(ended), len(ended))]
    for stage, count in Counter(filter(None, ended)).items():
        counts.append(("trajectory", f"given up after {stage}", count, len(ended)))
    counts.append(("trajectory", "folded", sum(not one for one in ended), len(ended)))
    folded = [row for row in rows if int(row.get("folds") or 0)]
    judged = [row for row in folded if row.get("filters")]
    counts.append(("sequence", "folded", len(folded), len(folded)))
    if judged:
        accepted = sum(row["filters"] == PASSED for row in judged)
        counts.append(("sequence", "accepted", accepted, len(folded)))
    failed = Counter(name for row in judged for name in failed_filters(row["filters"]))
    for name, count in failed.most_common():
        counts.append(("filter", name, len(judged) - count, len(judged)))
    shares = (f"{count / total:.3f}" if total else "" for _, _, count, total in counts)
    return [
        dict(zip(STATISTIC_COLUMNS, (*row, share), strict=True))
        for row, share in zip(counts, shares, strict=True)
    ]
