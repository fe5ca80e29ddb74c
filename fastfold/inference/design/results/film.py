"""Film of a design: CA atoms of its steps as models of one PDB file."""

from __future__ import annotations

import numpy as np
import torch

from fastfold.protein.metrics.superposition import superpose
from fastfold.protein.protein import chain_name

_FRAMES = 100


def film_pdb(trace: np.ndarray, chain: np.ndarray) -> str:
    """Write CA atoms of steps as a PDB file of models, each superposed on the last, at most 100 of them.

    ``trace [steps, N, 3]`` is in Å, and ``chain [N]`` has the chain number of each residue, which is named GLY.
    """
    chosen = np.unique(np.linspace(0, len(trace) - 1, min(_FRAMES, len(trace))).round().astype(int))
    points = torch.from_numpy(trace[chosen]).double()
    moved = superpose(points, points[-1:].expand_as(points), torch.ones(points.shape[:2]))[..., None].apply(
        points
    )
    number = np.concatenate([np.arange(count) for count in np.bincount(chain)]) + 1
    lines = []
    for model, frame in enumerate(moved.numpy(), 1):
        lines.append(f"MODEL     {model:4d}")
        for i, (x, y, z) in enumerate(frame.clip(-999, 9999)):
            letter = chain_name(int(chain[i]))[:1]
            lines.append(
                f"ATOM  {(i + 1) % 100000:5d}  CA  GLY {letter}{number[i] % 10000:4d}    {x:8.3f}{y:8.3f}{z:8.3f}"
                "  1.00  0.00           C  "
            )
        lines.append("ENDMDL")
    return "\n".join([*lines, "END", ""])
