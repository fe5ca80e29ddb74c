"""Text of the page has enough contrast in both themes, by the tokens of its style sheet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastfold.inference.output.plots import Band
from fastfold.inference.report import html_page
from fastfold.inference.report.html_page import page_file

PAGE = Path(html_page.__file__).parent / "page"
CSS = page_file("theme.css") + page_file("page.css")
TEXT = [
    *((ink, ground) for ink in ("ink", "soft") for ground in ("paper", "surface", "raised", "chosen")),
    ("accent", "surface"),
    ("on-accent", "accent"),
    *((tone, ground) for tone in ("good", "fair", "poor") for ground in ("surface", f"{tone}-ground")),
    *(("ink", f"{tone}-ground") for tone in ("good", "fair", "poor")),
]
PICTURES = [("edge", "surface"), ("helix", "surface"), ("strand", "surface"), ("accent", "paper")]


def tokens(theme: str) -> dict[str, str]:
    """Colours by name in a theme; the dark one changes some of the light one."""
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)[:2]
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    return found if theme == "light" else found | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark))


def contrast(one: str, other: str) -> float:
    """Ratio of the luminances of two colours (WCAG 2.2)."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_ratio_is_that_of_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(theme: str) -> None:
    colors = tokens(theme)
    ratios = {pair: contrast(*(colors[name] for name in pair)) for pair in TEXT}
    assert {pair: round(x, 2) for pair, x in ratios.items() if x < 4.5} == {}
    edges = {pair: contrast(*(colors[name] for name in pair)) for pair in PICTURES}
    assert {pair: round(x, 2) for pair, x in edges.items() if x < 3.0} == {}


def text_colors(css: str) -> set[str]:
    """Tokens of a style sheet that colour text."""
    return set(re.findall(r"(?<![-\w])color: var\(--([\w-]+)\)", css))


def test_every_text_colour_of_the_sheet_is_among_the_pairs() -> None:
    assert text_colors(CSS) <= {ink for ink, _ in TEXT}


def test_the_page_reads_fields_that_bands_of_plddt_have() -> None:
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in PAGE.rglob("*.js"))
    read = re.findall(r"\bband\.(\w+)", scripts) + re.findall(r"\bbandOf\([^;]*?\)\.(\w+)", scripts)
    for names in re.findall(r"\bbands\.map\(\(\{ ([\w, ]+) \}\)", scripts):
        read += names.split(", ")
    assert len(read) >= 10
    assert set(read) == set(Band._fields)
