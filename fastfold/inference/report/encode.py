"""Encode predictions for a page: quantised, compressed with zlib, in base64.

The page decodes a piece when it is shown.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.inference.output.score_files import MAX_PAE_BYTES, check_pae
from fastfold.inference.report.discover import read_json
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure

MAX_SIDE = 320
"""Largest number of rows of an aligned error that is stored whole; larger ones are averaged over squares."""

PAE_STEP = 0.25  #: Step in Å of aligned errors, which are stored as one byte each

_COORDINATE_STEP = 0.01


def pack(data: bytes) -> str:
    """Compress data with zlib and encode it in base64."""
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def pack_json(value: Any) -> str:
    """Compress a value of JSON's types, or raise ValueError for a number that is not finite."""
    return pack(json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii"))


def pack_structure(
    path: Path, sequences: Sequence[str], *, motion: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[dict[str, Any], str]:
    """Encode the atoms of a structure file, rotated so that the view along z shows the longest axes.

    ``sequences`` are those that were folded. A motion, a rotation ``[3, 3]`` and a translation ``[3]`` in Å, replaces
    this rotation and the centering. Errors are InputError for an unreadable file, ValueError for other sequences.

    Returns:
        Metadata (``step`` in Å, ``atoms``), and packed data: five bytes per residue with a bit for each of the 37
        atoms, then little-endian int16 ``x``, ``y``, ``z`` of each atom in steps from the centre.
    """
    chains = read_structure(path).chains
    lengths = [len(sequence) for sequence in sequences]
    mask = np.zeros((sum(lengths), rc.atom_type_num), bool)
    positions = np.zeros((*mask.shape, 3))
    starts = np.cumsum([0, *lengths])
    # A chain of unknown residues has no atoms and is missing in the file, so chains are matched by sequence.
    number = 0
    for chain in chains:
        while number < len(sequences) and not _is_part(chain.sequence, sequences[number]):
            number += 1
        if number == len(sequences):
            raise ValueError("its chains differ from those of the scores")
        rows = slice(starts[number], starts[number] + len(chain))
        mask[rows], positions[rows] = chain.mask > 0.5, chain.positions
        number += 1
    present = positions[mask]
    if not len(present):
        raise ValueError("it has no atoms")
    if motion is None:
        axes = np.linalg.eigh(np.cov(present.T, bias=True))[1][:, ::-1]  # columns, longest first
        present = present @ (axes * [1.0, 1.0, np.linalg.det(axes)])
        middle = (present.min(0) + present.max(0)) / 2
    else:
        present, middle = present @ motion[0].T + motion[1], np.zeros(3)
    return _pack_atoms(mask, present - middle)


def pack_atoms(mask: np.ndarray, positions: np.ndarray) -> tuple[dict[str, Any], str]:
    """Encode atoms as :func:`pack_structure`, from a mask ``[N, 37]`` and positions ``[N, 37, 3]`` in Å."""
    present = positions[mask]
    return _pack_atoms(mask, present - present.mean(0))


def _pack_atoms(mask: np.ndarray, points: np.ndarray) -> tuple[dict[str, Any], str]:
    step = max(_COORDINATE_STEP, float(np.abs(points).max()) / 32_000)
    quantized = np.rint(points / step).astype("<i2")
    data = np.packbits(mask, axis=1).tobytes() + quantized.tobytes()
    return {"step": step, "atoms": len(points)}, pack(data)


def pack_pae(path: Path, residues: int) -> tuple[dict[str, Any], str]:
    """Encode the aligned error of a prediction, or raise OSError or ValueError for another file.

    Returns:
        Metadata (``side`` of the matrix, ``stride``: residues per row, ``step`` and ``max`` in Å), and packed data: a
        byte for each element, row by row.
    """
    pae, largest = check_pae(read_json(path, MAX_PAE_BYTES), residues)
    stride = -(-residues // MAX_SIDE)
    side = -(-residues // stride)
    if stride > 1:
        edges = np.arange(0, residues, stride)
        counts = np.diff([*edges, residues])
        pae = np.add.reduceat(np.add.reduceat(pae, edges, 0), edges, 1) / np.outer(counts, counts)
    quantized = np.rint(np.clip(pae / PAE_STEP, 0, 255)).astype(np.uint8)
    return {"side": side, "stride": stride, "step": PAE_STEP, "max": largest}, pack(quantized.tobytes())


def _is_part(read: str, folded: str) -> bool:
    """Return True if a chain of the file equals the folded one."""
    return len(read) == len(folded) and all(
        a == b or "X" in (a, b) for a, b in zip(read, folded, strict=True)
    )
