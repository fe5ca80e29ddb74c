"""Make ``docs/prediction.png``: a prediction for a protein next to its experimental structure.

    python docs/make_pictures.py 1igd.pdb [--msa 1igd.a3m] [--weights mini] [--out docs/prediction.png]

The structure file (PDB or mmCIF, also compressed) has a single chain. Without an alignment, only its sequence is used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import fastfold
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.lddt import lddt
from fastfold.protein.metrics.tm_score import superpose, tm_score

CA = rc.atom_order["CA"]
STEPS = 12  # points of the drawn curve between two alpha carbons
COLORS = matplotlib.colors.LinearSegmentedColormap.from_list(
    "plddt", ["#ff7d45", "#ffdb13", "#65cbf3", "#0053d6"]
)


def smooth(points: np.ndarray) -> np.ndarray:
    """Return a Catmull-Rom curve ``[(N - 1) * STEPS + 1, d]`` through ``points [N, d]``."""
    padded = np.concatenate([2 * points[:1] - points[1:2], points, 2 * points[-1:] - points[-2:-1]])
    t = np.linspace(0, 1, STEPS, endpoint=False)[:, None, None]
    a, b, c, d = (padded[i : len(padded) - 3 + i] for i in range(4))
    curve = 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
    return np.concatenate([curve.swapaxes(0, 1).reshape(-1, points.shape[1]), points[-1:]])


def draw(axes: Axes, positions: np.ndarray, values: np.ndarray | None, title: str) -> None:
    """Draw a chain ``positions [N, 3]`` in Å as seen along the last axis, coloured by ``values [N]`` of 50 to 100."""
    curve = smooth(positions)
    depth = positions[:, 2]
    near = (depth - depth.min()) / max(float(np.ptp(depth)), 1e-6)
    color = np.tile([0.45, 0.5, 0.56, 1.0], (len(positions), 1))
    if values is not None:
        color = COLORS((values - 50) / 50)
    color[:, :3] = 1 - (1 - color[:, :3]) * (0.55 + 0.45 * near[:, None])  # distant parts are pale
    for i in np.argsort(depth):
        x, y = curve[max(0, (2 * i - 1) * STEPS // 2) : (2 * i + 1) * STEPS // 2 + 1, :2].T
        # A white edge separates the curve from those behind it; it ends before the neighbours begin.
        axes.plot(x[2:-2], y[2:-2], color="white", linewidth=7.5, solid_capstyle="butt")
        axes.plot(x, y, color=color[i], linewidth=4.0 + 1.5 * near[i], solid_capstyle="round")
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(title, fontsize=11)


def picture(structure: Path, msa: Path | None, weights: str, out: Path) -> str:
    """Fold, superpose and draw; return the caption of the picture."""
    chain = read_structure(structure).chains[0]
    prediction = fastfold.predict(chain.sequence, model=weights, msa=msa, name=structure.stem)
    predicted = torch.as_tensor(prediction.atom_positions[:, CA])
    experiment, mask = (
        torch.as_tensor(chain.positions[:, CA]).float(),
        torch.as_tensor(chain.mask[:, CA]).float(),
    )
    moved = superpose(predicted, experiment, mask)[..., None].apply(predicted).numpy()
    resolved = mask.numpy() > 0.5
    score = tm_score(predicted, experiment, mask)
    local = float(lddt(predicted, experiment, mask, per_residue=False))

    true = experiment.numpy()[resolved]
    center = true.mean(0)
    axes_of = np.linalg.svd(true - center, full_matrices=False)[2]  # the longest axis lies horizontally
    moved, true = (moved - center) @ axes_of.T, (true - center) @ axes_of.T
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.9), dpi=140)
    draw(left, moved, prediction.plddt, f"predicted by {weights}")
    draw(right, true, None, "experiment")
    both = np.concatenate([moved, true])
    low, high = both.min(0) - 3, both.max(0) + 3
    for axes in (left, right):
        axes.set_xlim(low[0], high[0])
        axes.set_ylim(low[1], high[1])
    scale = plt.cm.ScalarMappable(norm=plt.Normalize(50, 100), cmap=COLORS)
    figure.colorbar(scale, ax=[left, right], shrink=0.8, pad=0.02, label="pLDDT")
    figure.savefig(out, bbox_inches="tight", pad_inches=0.05)
    return (
        f"{structure.name}: TM-score {score:.2f}, lDDT-CA {local:.2f}, {out.stat().st_size:,} bytes in {out}"
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("structure", type=Path, help="experimental structure")
    parser.add_argument("--msa", type=Path, help="alignment whose first row is the chain")
    parser.add_argument("--weights", default="mini")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("prediction.png"))
    args = parser.parse_args()
    print(picture(args.structure, args.msa, args.weights, args.out))


if __name__ == "__main__":
    main()
