"""Suggestions for names that are unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(
    name: str,
    known: Iterable[str],
    *,
    meant: str | None = None,
    otherwise: str = "check the spelling",
    cutoff: float = 0.6,
) -> str:
    """Return a question for the known name nearest to a wrong one, for the end of an error message.

    Args:
        name: The wrong name.
        known: Names that are valid in its place.
        meant: The right name, if a table has it; None for the nearest of ``known``.
        otherwise: Text if no name is near.
        cutoff: Smallest similarity of a near name, 0 to 1 (:meth:`difflib.SequenceMatcher.ratio`).

    Example:
        >>> suggest("num_recycels", ["num_recycles", "seeds"])
        'did you mean num_recycles?'
        >>> suggest("x", ["num_recycles", "seeds"])
        'check the spelling'
    """
    near = [meant] if meant else difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise
