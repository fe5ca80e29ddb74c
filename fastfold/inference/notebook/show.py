"""Predictions in notebooks: the table of their scores, and the page of one of them."""

from __future__ import annotations

import html
import tempfile
from dataclasses import dataclass
from typing import Any

from fastfold.inference.output.prediction import Prediction
from fastfold.inference.output.writer import listed_scores
from fastfold.inference.report.write import write_report


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


@dataclass(frozen=True)
class InlinePage:
    """A page that notebooks show: its HTML, which loads nothing from a network, and the pixels of its height."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        return (
            f'<iframe style="width: 100%; height: {self.height}px; border: 0" title="prediction" '
            f'srcdoc="{html.escape(self.page, quote=True)}"></iframe>'
        )


def view_prediction(prediction: Prediction, *, height: int = 900) -> InlinePage:
    """Return the page of a prediction with a height in pixels: structure, aligned error, pLDDT and scores."""
    with tempfile.TemporaryDirectory() as folder:
        prediction.save(folder, rank=1, plots=False)
        return InlinePage(write_report(folder).read_text("utf-8"), height)
