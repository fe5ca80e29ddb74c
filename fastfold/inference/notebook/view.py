"""The page of one prediction inside of a notebook."""

from __future__ import annotations

import html
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastfold.inference.report.write import write_report

if TYPE_CHECKING:
    from fastfold.inference.output.prediction import Prediction


@dataclass(frozen=True)
class InlinePage:
    """A page that notebooks show.

    Attributes:
        page: Its HTML, which loads nothing from a network.
        height: Height of its frame in pixels.
    """

    page: str
    height: int

    def _repr_html_(self) -> str:
        """Return a frame that holds the page."""
        return (
            f'<iframe style="width: 100%; height: {self.height}px; border: 0" title="prediction" '
            f'srcdoc="{html.escape(self.page, quote=True)}"></iframe>'
        )


def view_prediction(prediction: Prediction, *, height: int = 900) -> InlinePage:
    """Return the page of a prediction: structure, aligned error, pLDDT and scores.

    Args:
        prediction: The prediction.
        height: Height of the frame in pixels.
    """
    with tempfile.TemporaryDirectory() as folder:
        prediction.save(folder, rank=1, plots=False)
        return InlinePage(write_report(folder).read_text("utf-8"), height)
