"""Plots are the same bytes for the same input, and take any length and any name."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from fastfold.inference.output.plots import confidence_png


def size(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG file."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.parametrize("residues", [1, 2, 1030])
def test_any_length_is_drawn_and_aligned_errors_take_a_panel_of_their_own(residues: int) -> None:
    plddt, chains = np.full(residues, 70.0), np.zeros(residues, np.int32)
    alone = confidence_png(plddt, chains)
    both = confidence_png(plddt, chains, pae=np.ones((residues, residues)), max_pae=31.75)
    assert size(both)[0] > size(alone)[0]
    assert size(both)[1] == size(alone)[1]


def test_the_same_input_gives_the_same_bytes_and_names_are_not_formulas() -> None:
    plddt, chains = np.linspace(0, 100, 9), np.repeat([0, 1], [4, 5])
    plot = confidence_png(plddt, chains, title="$a_")
    assert plot == confidence_png(plddt, chains, title="$a_")
    assert plot != confidence_png(plddt[::-1], chains, title="$a_")
