"""Agreement of a design with the backbone or the motif that was given, and closure of rings."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.chain_mapping import order_copies
from fastfold.protein.metrics.tm_score import rmsd

BACKBONE = ("backbone_rmsd", "seqid")  #: Figures of designs for a whole backbone
MOTIF = ("motif_rmsd",)  #: Figures of designs around a motif
RING = ("ring_gap",)  #: Figures of rings


def given_figures(task: DesignTask) -> tuple[str, ...]:
    """Return the names of the figures that compare designs of a task with its given residues."""
    if task.reference is None:
        return ()
    return BACKBONE if task.name == "fixbb" or task.reference.is_summed else MOTIF


def given_agreement(task: DesignTask, positions: np.ndarray, sequence: str) -> dict[str, float]:
    """Compare a structure and sequence of a task with its given residues; empty for a task without them.

    ``backbone_rmsd`` or ``motif_rmsd`` is the RMSD in Å of the CA atoms of supervised residues, superposed on
    themselves and in the order of :func:`fitting_order`. ``seqid`` is the share of residues of a known type that have
    it, kept ones included, as in ColabDesign.

    Args:
        task: Task of the design.
        positions: Atoms ``[N, 37, 3]`` in Å.
        sequence: Letters of all ``N`` residues.
    """
    names = given_figures(task)
    if task.reference is None:
        return {}
    ca = rc.atom_order["CA"]
    true, own = task.reference.aatype.numpy(), rc.sequence_to_aatype(sequence)
    # A kept residue of unknown type has no atoms in a fold.
    compared = task.reference.rows > 0.5
    known = (task.reference.mask[:, ca] > 0.5) & compared & torch.from_numpy(own < rc.restype_num)
    wanted, everywhere = task.reference.positions[:, ca], np.ones(len(positions))
    order = fitting_order(task, sequence, positions[:, ca], everywhere, wanted, known.double())
    points = torch.from_numpy(np.asarray(positions[order, ca], np.float64))
    figures = {names[0]: float(rmsd(points, wanted, known.double()))}
    if "seqid" in names:
        typed = (true < rc.restype_num) & compared.numpy()
        figures["seqid"] = float((true == own)[typed].mean()) if typed.any() else 0.0
    return figures


def fitting_order(
    task: DesignTask, sequence: str, ca: np.ndarray, present: np.ndarray, wanted: Tensor, known: Tensor
) -> np.ndarray:
    """Return the order of residues ``[N]`` in which copies of a chain fit given CA atoms best, by TM-score.

    Args:
        task: Task of the design.
        sequence: Letters of all ``N`` residues.
        ca: CA atoms ``[N, 3]`` of a structure of the task in Å.
        present: ``[N]``, 1 for those that it has.
        wanted: Given CA atoms ``[N, 3]``.
        known: ``[N]``, 1 for those that are compared.
    """
    letters = np.array(list(sequence))
    chains = ["".join(letters[task.chain == number]) for number in np.unique(task.chain)]
    points, has = (torch.from_numpy(np.asarray(one, np.float64)) for one in (ca, present))
    return order_copies(chains, points, wanted, has, known)[1]


def ring_gap(task: DesignTask, positions: np.ndarray) -> float | None:
    """Return the largest distance in Å from C of a ring's last residue to N of its first; None without rings.

    ``positions`` are ``[N, 37, 3]`` in Å. A closed ring has 1.33 Å.
    """
    if not task.cyclic:
        return None
    chains = [np.flatnonzero(task.chain == number) for number in np.unique(task.chain[task.in_designed])]
    first, last = [chain[0] for chain in chains], [chain[-1] for chain in chains]
    gaps = positions[first, rc.atom_order["N"]] - positions[last, rc.atom_order["C"]]
    return float(np.sqrt(np.square(gaps.astype(np.float64)).sum(-1)).max())
