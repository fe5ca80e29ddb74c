"""The page of one prediction inside of a notebook."""

from __future__ import annotations

import html
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastfold.inference.report.write import write_report

if TYPE_CHECKING:
    from fastfold.inference.output.prediction import Prediction


@dataclass(frozen=True)
class InlinePage:
    """A page that notebooks show: its HTML, which loads nothing from a network, and the pixels of its height."""

    page: str = field(repr=False)
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
