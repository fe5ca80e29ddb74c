"""Page of a run's curves, to point at: one HTML file without a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

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
    folder = files("fastfold.training.report") / "page"
    script = f"(() => {{\n'use strict';\n{(folder / 'curves.js').read_text('utf-8')}}})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
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
        "policy": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'",
        "title": html.escape(title, quote=True),
        # Without characters that could end a script element or begin a comment.
        "data": json.dumps(data, allow_nan=False).translate({ord(c): f"\\u{ord(c):04x}" for c in "&<>"}),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: values[name[1]], (folder / "curves.html").read_text("utf-8"))


def _points(curve: Curve) -> dict[str, list[float]]:
    steps, values = curve
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).round().astype(np.int64))
    return {"steps": steps[kept].tolist(), "values": [float(f"{value:.6g}") for value in values[kept]]}
