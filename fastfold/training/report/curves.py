"""Page of a run's curves, to point at: one HTML file without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastfold.inference.report.html_page import (
    fill_template,
    json_element,
    page_file,
    script_of,
    source_hash,
)
from fastfold.training.report.plots import Curve

MAX_POINTS = 2000  #: Largest number of points of a curve on the page


@dataclass(frozen=True)
class Chart:
    """Curves of one picture, by their names."""

    title: str  #: Heading
    label: str  #: Name of the vertical axis
    logarithmic: bool  #: True if the axis starts as a logarithmic one
    curves: Mapping[str, Curve]  #: Steps and values


def curves_page(title: str, charts: Sequence[Chart], marks: Sequence[int]) -> str:
    """Return the page of curves as HTML; ``marks`` are steps of events, drawn as dotted lines.

    Longer curves are thinned to :data:`MAX_POINTS` points, with the first and the last. The page loads nothing, and
    only its own script runs.
    """
    package = "fastfold.training.report"
    script = script_of(page_file("curves.js", package))
    data = {
        "marks": sorted(set(marks)),
        "charts": [
            {
                "title": chart.title,
                "label": chart.label,
                "logarithmic": chart.logarithmic,
                "curves": [{"name": name, **_points(curve)} for name, curve in chart.curves.items()],
            }
            for chart in charts
        ],
    }
    values = {
        "policy": f"default-src 'none'; script-src {source_hash(script)}; style-src 'unsafe-inline'; base-uri 'none'",
        "title": title,
        "data": json_element(data),
        "script": script,
    }
    return fill_template(page_file("curves.html", package), values, plain=("data", "script"))


def _points(curve: Curve) -> dict[str, list[float]]:
    steps, values = curve
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).round().astype(np.int64))
    return {"steps": steps[kept].tolist(), "values": [float(f"{value:.6g}") for value in values[kept]]}
