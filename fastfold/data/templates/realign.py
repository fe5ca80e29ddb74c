"""Realign a hit with Kalign if its file has another sequence (AlphaFold's supplement, section 1.2.3)."""

from __future__ import annotations

from fastfold.data.templates.outcome import TemplateSkipped
from fastfold.utils.packages import require_package

MIN_IDENTITY = 0.9  #: Smallest share of equal residues in the shorter sequence


def align_pair(first: str, second: str) -> tuple[str, str]:
    """Align two sequences with Kalign 3; gaps are ``-``."""
    require_package("kalign-python", "aligning a template whose file has another sequence")
    import kalign

    aligned = kalign.align([first, second], seq_type="protein", n_threads=1)
    return aligned[0], aligned[1]


def map_to_sequence(
    listed: str, actual: str, *, name: str, min_identity: float = MIN_IDENTITY
) -> dict[int, int]:
    """Map a listed sequence's residues to their places in the actual sequence.

    ``min_identity`` is the smallest share of equal residues in the shorter one.

    Raises:
        TemplateSkipped: Fewer of the shorter one's residues are equal.
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
    if share < min_identity:
        raise TemplateSkipped(
            "other sequence",
            f"the sequence of {name} in its file differs: {share:.0%} of the residues are equal, expected at least "
            f"{min_identity:.0%}",
        )
    return mapping
