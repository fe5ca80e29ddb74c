"""The page of one prediction inside of a notebook."""

from __future__ import annotations

import html
import tempfile
from dataclasses import dataclass, field

from fastfold.inference.output.prediction import Prediction
from fastfold.inference.report.write import write_report


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


def view(prediction: Prediction, *, height: int = 900) -> InlinePage:
    """Return the page of a prediction for a notebook: structure, aligned error, pLDDT and scores.

    ``height`` is that of its frame in pixels.

    Example:
        >>> import fastfold
        >>> fastfold.view(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0))
        InlinePage(height=900)
    """
    with tempfile.TemporaryDirectory() as folder:
        prediction.save(folder, rank=1, plots=False)
        return InlinePage(write_report(folder).read_text("utf-8"), height)
