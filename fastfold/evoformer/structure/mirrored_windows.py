"""Windows of a CA trace with the wrong hand, and their mirror images at the same place.

Distances do not tell a helix or a turn from its mirror image. Residues in the wrong one have phi above 0 on any peptide
planes, which is rare in proteins for residues other than glycine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.protein.metrics.tm_score import superpose

_FLANK = 2  #: Residues on each side that are mirrored with a run of residues


def mirror_windows(ca: Tensor, is_wrong: Tensor, bonded: Tensor) -> Tensor:
    """Replace windows around wrong residues by their mirror images, superposed on themselves.

    Args:
        ca: ``[N, 3]`` in Å.
        is_wrong: ``[N]``, True for residues with the wrong hand; single ones between two of them count too.
        bonded: ``[N - 1]``, True where a residue and the next are neighbours in a chain. No window crosses a break.

    Returns:
        CA positions ``[N, 3]``.
    """
    moved = ca.cpu().double()
    for start, stop in _windows(is_wrong.tolist(), bonded.tolist()):
        window = moved[start:stop]
        image = window * window.new_tensor([1.0, 1.0, -1.0])
        motion = superpose(image, window, torch.ones(len(window)))
        moved[start:stop] = motion[..., None].apply(image)
    return moved.to(ca)


def _windows(is_wrong: list[bool], bonded: list[bool]) -> list[tuple[int, int]]:
    """Return half-open ranges of residues, one for each run."""
    windows = []
    number = 0
    while number < len(is_wrong):
        if not is_wrong[number]:
            number += 1
            continue
        last = number
        while any(is_wrong[last + 1 : last + 3]) and bonded[last]:
            last += 1
        start, stop = number, last + 1
        for _ in range(_FLANK):
            if start > 0 and bonded[start - 1]:
                start -= 1
            if stop < len(is_wrong) and bonded[stop - 1]:
                stop += 1
        windows.append((start, stop))
        number = last + 1
    return windows
