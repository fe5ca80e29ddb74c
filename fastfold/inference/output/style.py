"""Colours and fonts of the plots and of the report page."""

from __future__ import annotations

from typing import Final, NamedTuple


class Band(NamedTuple):
    """Range of pLDDT."""

    low: int  #: Lower end, inclusive
    high: int  #: Upper end
    colour: str  #: ``#rrggbb``, AlphaFold DB's colours
    name: str  #: Name of the range


BANDS: Final = (
    Band(90, 100, "#0053d6", "very high"),
    Band(70, 90, "#65cbf3", "high"),
    Band(50, 70, "#ffdb13", "low"),
    Band(0, 50, "#ff7d45", "very low"),
)

CHAIN_COLOURS: Final = (
    "#1b7837", "#762a83", "#2166ac", "#b2182b", "#8c510a", "#01665e",
    "#c51b7d", "#4d4d4d", "#e08214", "#35978f", "#542788", "#7fbc41",
)  # fmt: skip
"""Colours of chains in order, repeated for more chains."""

IDENTITY_COLOURS: Final = ("#d9d9d9", "#c7c1de", "#a79fcf", "#7c6bb5", "#4a2f8f")
"""Colours of alignment rows by their identity to the query, from the lowest."""

PAE_COLOURS: Final = ("#00441b", "#1b7837", "#5aae61", "#a6dba0", "#d9f0d3", "#f7fcf5")
"""Colours from no aligned error to the largest."""

INK: Final = "#1f2933"
"""Colour of text and lines."""

FAINT: Final = "#8a949e"
"""Colour of grids, frames and secondary text."""

FONTS: Final = ("DejaVu Sans", "Verdana", "Arial", "sans-serif")
