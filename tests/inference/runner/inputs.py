"""Sequences, and alignments of them."""

from __future__ import annotations

import numpy as np

SEQUENCE = "MKTAYIAKQR"
OTHER = "GSHMAWLPE"
LETTERS = "ARNDCQEGHILKMFPSTWYV"


def a3m(sequence: str, rows: int = 4) -> str:
    """An alignment of random rows below the query."""
    rng = np.random.default_rng(0)
    text = f">query\n{sequence}\n"
    for i in range(1, rows):
        text += f">row_{i}\n" + "".join(rng.choice(list(LETTERS), len(sequence))) + "\n"
    return text


def stockholm(sequence: str, rows: int = 3) -> str:
    lines = [f"row{i} {sequence[i:] + sequence[:i]}" for i in range(1, rows)]
    return "\n".join(["# STOCKHOLM 1.0", f"query {sequence}", *lines, "//"]) + "\n"
