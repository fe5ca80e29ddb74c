"""Kalign aligns a hit anew whose listed sequence is not the one of its file (AlphaFold's supplement, 1.2.3)."""

from __future__ import annotations

from fastfold.data.templates.outcome import TemplateSkipped
from fastfold.utils.packages import require_package

MIN_IDENTITY = 0.9
"""Share of the shorter sequence that must be equal."""


def align_pair(first: str, second: str) -> tuple[str, str]:
    """Two sequences aligned by Kalign 3, ``-`` for gaps."""
    require_package("kalign-python", "aligning a template whose file has another sequence")
    import kalign

    aligned = kalign.align([first, second], seq_type="protein", n_threads=1)
    return aligned[0], aligned[1]


def map_to_sequence(listed: str, actual: str, *, name: str) -> dict[int, int]:
    """Places of a listed sequence's residues in the actual one.

    Args:
        listed: Letters of the hit.
        actual: Letters of the whole chain in its file.
        name: The hit's name, for the message.

    Returns:
        For each residue of ``listed`` that is aligned, its place in ``actual``.

    Raises:
        TemplateSkipped: Fewer than 90% of the shorter one's residues are equal.
    """
    mapping: dict[int, int] = {}
    same = mine = theirs = 0
    for a, b in zip(*align_pair(listed, actual), strict=True):
        if a != "-" and b != "-":
            mapping[mine] = theirs
            same += a == b
        mine += a != "-"
        theirs += b != "-"
    share = same / min(len(listed), len(actual))
    if share < MIN_IDENTITY:
        raise TemplateSkipped(
            "other sequence",
            f"the sequence of {name} in its file is another one: {share:.0%} of the residues are equal, at least "
            f"{MIN_IDENTITY:.0%} must be",
        )
    return mapping
