"""Filter hits before their structures are read (AlphaFold's supplement, section 1.2.3)."""

from __future__ import annotations

from datetime import date

from fastfold.data.templates.hits import TemplateHit
from fastfold.data.templates.outcome import TemplateSkipped

MAX_SUBSEQUENCE = 0.95  #: Largest share of the query for a hit that is a part of the query itself
MIN_ALIGNED = 0.1  #: Share of the query's residues that a hit must exceed
MIN_RESIDUES = 10  #: Smallest number of residues of a hit


def check_hit(
    hit: TemplateHit, query: str, *, released: date | None = None, limit: date | None = None
) -> None:
    """Check a hit by the search's information.

    The checks are AlphaFold's, in its order: the listed release date, the aligned share, a repetition of the query, the
    length.

    Raises:
        TemplateSkipped: The hit is left out; has the reason.
    """
    if released is not None and limit is not None and released > limit:
        raise TemplateSkipped("date", f"released on {released}, after {limit}")
    share = hit.aligned_cols / len(query)
    if share <= MIN_ALIGNED:
        raise TemplateSkipped(
            "coverage", f"aligned with {100 * share:.1f}% of the query, expected more than {MIN_ALIGNED:.0%}"
        )
    letters = hit.letters
    ratio = len(letters) / len(query)
    if letters in query and ratio > MAX_SUBSEQUENCE:
        raise TemplateSkipped(
            "duplicate", f"it is {100 * ratio:.1f}% of the query, more than {MAX_SUBSEQUENCE:.0%}"
        )
    if len(letters) < MIN_RESIDUES:
        raise TemplateSkipped("short", f"it has {len(letters)} residues, fewer than {MIN_RESIDUES}")
