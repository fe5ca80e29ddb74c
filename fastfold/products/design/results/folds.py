"""Figures of a design's folds, under BindCraft's names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fastfold.errors import InputError
from fastfold.inference.output.score_files import read_pae
from fastfold.inference.report.discover import FoundPrediction
from fastfold.products.design.agreement import BACKBONE, MOTIF, RING, fitting_order, given_agreement, ring_gap
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.interface.geometry import TOUCH, count_chain_clashes, interface_geometry
from fastfold.protein.metrics.lddt import count_clashes
from fastfold.protein.metrics.secondary_structure import HELIX, LOOP, STRAND, assign_secondary_structure
from fastfold.protein.metrics.tm_score import rmsd, superpose

SINGLE = ("pLDDT", "pTM", "pAE", "RMSD", "Clashes")
INTERFACE = ("i_pTM", "i_pAE", "i_pLDDT", "n_InterfaceResidues")
RELAXED = "Relaxed_Clashes"  #: Figure of relaxed folds alone
RESIDUES = tuple(f"InterfaceAAs_{letter}" for letter in sorted(rc.restypes))
_SHARES = {"Helix%": HELIX, "BetaSheet%": STRAND, "Loop%": LOOP}
GEOMETRY = (
    "ShapeComplementarity", "dSASA", "Interface_SASA_%", "Interface_Hydrophobicity", "Surface_Hydrophobicity",
    "n_InterfaceHbonds", "InterfaceHbondsPercentage", "n_InterfaceUnsatHbonds", "InterfaceUnsatHbondsPercentage",
    *(f"{part}_{name}" for part in ("Interface", "Binder") for name in _SHARES), "ss_pLDDT", *RESIDUES,
)  # fmt: skip
"""Figures of a binder's interface and secondary structure."""
BOUND = ("Hotspot_RMSD", "Target_RMSD", "Unrelaxed_Clashes", RELAXED, *GEOMETRY)
ALONE = ("Binder_pLDDT", "Binder_pTM", "Binder_pAE", "Binder_RMSD")
"""Figures of every fold, of those with several chains, of binders with their given chains, and of binders alone."""

_LARGEST_ERROR = 31.0

Figures = dict[str, float | None]


def fold_figures(prediction: FoundPrediction, task: DesignTask, design: np.ndarray | None) -> Figures:
    """Return the figures of a fold of a task; None for those that it lacks.

    ``pLDDT`` (of the designed chains), ``i_pLDDT`` (of their residues at the interface), ``pTM`` and ``i_pTM`` are 0
    to 1. ``pAE`` (within the designed chains) and ``i_pAE`` (between them and other chains, both ways) are divided by
    31 Å. ``n_InterfaceResidues`` counts residues of designed chains with an atom within 4 Å of another chain.
    ``Clashes`` counts pairs of atoms (:func:`fastfold.protein.metrics.lddt.count_clashes`). Deviations are those of
    CA in Å: ``RMSD`` from the design ``[N, 37, 3]`` if it is given, ``Hotspot_RMSD`` of the binder from it with the
    given chains superposed, and ``Target_RMSD`` of the given chains from their file. Figures of given backbones, motifs
    and rings are those of :mod:`fastfold.products.design.agreement`, those of a binder's interface are
    :data:`GEOMETRY`. The relaxed structure is read if the fold has one. ``Relaxed_Clashes`` and ``Unrelaxed_Clashes``
    count pairs of atoms of different chains within 2.4 Å.
    """
    chosen = task.in_designed
    scores = np.asarray(prediction.scores["plddt"], np.float64) / 100.0
    figures: Figures = dict.fromkeys((*SINGLE, *INTERFACE, *BOUND, *BACKBONE, *MOTIF, *RING))
    figures |= {"pLDDT": float(scores[chosen].mean())}
    figures |= {name: prediction.scores.get(key) for name, key in (("pTM", "ptm"), ("i_pTM", "iptm"))}
    same = task.chain[:, None] == task.chain[None]
    if (pae := _aligned_error(prediction, len(chosen))) is not None:
        figures["pAE"] = float(pae[same & chosen[:, None]].mean())
        between = ~same & (chosen[:, None] | chosen[None])
        figures["i_pAE"] = float(pae[between].mean()) if between.any() else None
    if prediction.structure is None:
        return figures
    chains = read_structure(prediction.structure).chains
    positions = np.concatenate([chain.positions for chain in chains])
    mask = np.concatenate([chain.mask for chain in chains])
    chain, index = torch.from_numpy(task.chain), torch.from_numpy(task.residue_index)
    figures["Clashes"] = float(
        count_clashes(torch.from_numpy(positions), torch.from_numpy(mask), index, chain)
    )
    sequence = "".join(one.sequence for one in chains)
    figures |= given_agreement(task, positions, sequence)
    figures["ring_gap"] = ring_gap(task, positions)
    if not same.all():
        near = touching(positions, mask, task.chain) & chosen
        figures["n_InterfaceResidues"] = float(near.sum())
        figures["i_pLDDT"] = float(scores[near].mean()) if near.any() else None
    if task.bound_ca is not None:
        aatype = rc.sequence_to_aatype(sequence)
        figures |= geometry_figures(positions, mask, aatype, task, scores)
        is_relaxed = prediction.has_relaxed_structure
        figures[RELAXED if is_relaxed else "Unrelaxed_Clashes"] = count_chain_clashes(
            positions, mask, task.chain
        )
    ca = rc.atom_order["CA"]
    return figures | _deviations(positions[:, ca], mask[:, ca] > 0.5, task, design, sequence)


def _deviations(
    ca: np.ndarray, present: np.ndarray, task: DesignTask, design: np.ndarray | None, sequence: str
) -> Figures:
    """Return the deviations of the ``present [N]`` CA atoms ``[N, 3]`` that are defined for a task.

    Copies of a chain are in the order that fits the design, or the given chains, best.
    """
    deviations: Figures = {}
    binder = torch.from_numpy(task.in_designed).double()
    if design is not None:
        wanted = torch.from_numpy(design[:, rc.atom_order["CA"]]).double()
        order = fitting_order(task, sequence, ca, present, wanted, torch.ones_like(binder))
        points, whole = (torch.from_numpy(one[order]).double() for one in (ca, present))
        deviations["RMSD"] = float(rmsd(points, wanted, whole))
        if task.bound_ca is not None:
            moved = superpose(points, wanted, whole * (1 - binder)).apply(points)
            squared, compared = (moved - wanted).square().sum(-1), whole * binder
            deviations["Hotspot_RMSD"] = float(((squared * compared).sum() / compared.sum()).sqrt())
    if task.bound_ca is not None:
        known = torch.from_numpy(np.isfinite(task.bound_ca).all(-1)).double()
        bound = torch.from_numpy(np.nan_to_num(task.bound_ca)).double()
        order = fitting_order(task, sequence, ca, present, bound, known)
        points, whole = (torch.from_numpy(one[order]).double() for one in (ca, present))
        deviations["Target_RMSD"] = float(rmsd(points, bound, known * whole))
    return deviations


def geometry_figures(
    positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray, task: DesignTask, plddt: np.ndarray
) -> Figures:
    """Return :data:`GEOMETRY` of a binder's fold; shares of residues in percent, ``Surface_Hydrophobicity`` 0 to 1.

    Args:
        positions: Atoms ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for present atoms.
        aatype: Residue types ``[N]``.
        task: Task of the binder.
        plddt: pLDDT ``[N]``, 0 to 1.
    """
    binder = task.in_designed
    interface = interface_geometry(positions, mask, aatype, binder)
    count = int(interface.residues.sum())
    structure = np.array(list(assign_secondary_structure(positions, mask, aatype, task.chain)))
    regular = binder & (structure != LOOP)
    figures: Figures = {
        "ShapeComplementarity": interface.complementarity,
        "dSASA": interface.buried_area,
        "Interface_SASA_%": _percent(interface.buried_area, interface.binder_area),
        "Interface_Hydrophobicity": _percent(interface.hydrophobicity, 1.0),
        "Surface_Hydrophobicity": interface.surface_hydrophobicity,
        "n_InterfaceHbonds": float(interface.bonds),
        "InterfaceHbondsPercentage": _percent(interface.bonds, count),
        "n_InterfaceUnsatHbonds": float(interface.unsatisfied),
        "InterfaceUnsatHbondsPercentage": _percent(interface.unsatisfied, count),
        "ss_pLDDT": float(plddt[regular].mean()) if regular.any() else None,
    }
    for part, residues in (("Interface", interface.residues), ("Binder", binder)):
        for name, letter in _SHARES.items():
            own = structure[residues]
            figures[f"{part}_{name}"] = 100.0 * float((own == letter).mean()) if len(own) else None
    letters = rc.aatype_to_sequence(aatype[interface.residues])
    return figures | {name: float(letters.count(name[-1])) for name in RESIDUES}


def _percent(part: float | None, whole: float) -> float | None:
    return None if part is None or not whole else 100.0 * part / whole


def alone_figures(prediction: FoundPrediction, task: DesignTask, design: np.ndarray) -> Figures:
    """Return the figures of a binder that is folded alone, from its sequence.

    ``Binder_pLDDT``, ``Binder_pTM`` and ``Binder_pAE`` are those of this fold. ``Binder_RMSD`` is its deviation of CA
    from the binder in the design, whose atoms are ``[L, 37, 3]`` in Å.
    """
    figures = fold_figures(prediction, task, design)
    return {name: figures[name.removeprefix("Binder_")] for name in ALONE}


def _aligned_error(prediction: FoundPrediction, residues: int) -> np.ndarray | None:
    """Return the aligned errors ``[N, N]`` divided by 31 Å; None without their file."""
    if (path := prediction.files.get("_pae.json")) is None:
        return None
    try:
        return read_pae(path, residues)[0] / _LARGEST_ERROR
    except InputError:
        return None


def touching(positions: np.ndarray, mask: np.ndarray, chain: np.ndarray) -> np.ndarray:
    """Return the residues ``[N]`` bool with an atom within 4 Å of another chain.

    Positions are ``[N, 37, 3]`` in Å, the mask ``[N, 37]`` is 1 for present atoms, and chains have numbers ``[N]``.
    """
    residue, slot = np.nonzero(mask > 0.5)
    atoms = positions[residue, slot]
    near = np.zeros(len(chain), bool)
    for number in range(len(chain)):
        others = atoms[chain[residue] != chain[number]]
        own = positions[number][mask[number] > 0.5]
        if len(own) and len(others):
            apart = np.square(own[:, None] - others[None]).sum(-1)
            near[number] = apart.min() <= TOUCH**2
    return near


def mean_figure(folds: Sequence[Figures], name: str) -> float | None:
    """Return the mean of a figure over folds; None if one lacks it or there are no folds."""
    values = [fold.get(name) for fold in folds]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
