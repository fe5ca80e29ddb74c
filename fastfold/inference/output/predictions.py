"""Predictions of several sequences, and the table of their scores."""

from __future__ import annotations

import html
from typing import Any

from fastfold.inference.output.prediction import Prediction
from fastfold.inference.output.writer import listed_scores


class Predictions(dict[str, list[Prediction]]):
    """Predictions by the name of their sequence, best first."""

    def table(self) -> list[dict[str, Any]]:
        """Return a row per prediction: ``name``, ``rank`` and scores; ``pandas.DataFrame`` takes the rows."""
        return [
            {"name": name, "rank": rank, **listed_scores(prediction)}
            for name, predictions in self.items()
            for rank, prediction in enumerate(predictions, 1)
        ]

    def _repr_html_(self) -> str:
        rows = self.table()
        if not rows:
            return "<p>no predictions</p>"
        head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_shown(value))}</td>' for value in row.values())}</tr>"
            for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
