"""Which hits are not worth reading a structure for (AlphaFold's supplement, section 1.2.3)."""

from __future__ import annotations

from datetime import date

from fastfold.data.templates.hits import TemplateHit
from fastfold.data.templates.outcome import TemplateSkipped

MAX_SUBSEQUENCE = 0.95
"""A hit that is a part of the query itself, longer than this share of it, is left out."""
MIN_ALIGNED = 0.1
"""A hit that aligns with this share of the query's residues, or fewer, is left out."""
MIN_RESIDUES = 10
"""A hit with fewer residues is left out."""


def check_hit(
    hit: TemplateHit, query: str, *, released: date | None = None, limit: date | None = None
) -> None:
    """Raises :class:`TemplateSkipped` if a hit is to be left out by what the search says of it.

    The tests are AlphaFold's, in its order: the listed release date, the aligned share, a repetition of the query, the
    length.

    Args:
        hit: The hit.
        query: The query's sequence.
        released: The entry's date in a list of release dates, None if it stands in none.
        limit: Newest date allowed, None for any.
    """
    if released is not None and limit is not None and released > limit:
        raise TemplateSkipped("date", f"released on {released}, after {limit}")
    share = hit.aligned_cols / len(query)
    if share <= MIN_ALIGNED:
        raise TemplateSkipped(
            "coverage", f"aligned with {100 * share:.1f}% of the query; it takes more than {MIN_ALIGNED:.0%}"
        )
    letters = hit.letters
    ratio = len(letters) / len(query)
    if letters in query and ratio > MAX_SUBSEQUENCE:
        raise TemplateSkipped(
            "duplicate", f"it is {100 * ratio:.1f}% of the query, more than {MAX_SUBSEQUENCE:.0%}"
        )
    if len(letters) < MIN_RESIDUES:
        raise TemplateSkipped("short", f"it has {len(letters)} residues, fewer than {MIN_RESIDUES}")
