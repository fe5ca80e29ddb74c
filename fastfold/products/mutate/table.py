"""Table and picture of mutants: differences and effective strain of their predictions to those of the wild type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastfold.data.targets import Target
from fastfold.errors import InputError
from fastfold.inference.output.plots import scan_png
from fastfold.inference.output.results_folder import PredictionRecord, ResultsFolder, TargetResults
from fastfold.inference.output.score_files import read_pae, read_scores
from fastfold.inference.output.summary import mean_score, score_table
from fastfold.inference.report.products import MUTATIONS
from fastfold.inference.report.write import write_report
from fastfold.products.mutate.mutations import Variant, mutated_residues
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.tm_score import best_rotation
from fastfold.utils.atomic_files import write_atomic

TABLE = MUTATIONS
SCAN = "mutations.png"  #: Picture of a scan of mutants in a folder of results
NEIGHBORS_WITHIN = 13.0  #: Largest distance in Å of CA atoms that are neighbours

_MEANS = (
    *("plddt", "ptm", "dplddt", "dplddt_site", "dpae", "dpae_site", "dptm", "diptm"),
    *("strain", "strain_site"),
)
COLUMNS = ("mutations", *_MEANS, "largest_strain", "predictions", "name")
"""Columns of the table: differences mutant minus wild type, means over the predictions of both by one network with one
seed and sample; ``site`` are the mutated residues; strains as of :func:`effective_strain`; aligned errors in Å."""


class _MutantFold(NamedTuple):
    """pLDDT ``[N]``, pTM, ipTM, aligned errors ``[N, N]`` and CA atoms ``[N, 3]`` in Å of a written prediction.

    Residues without a CA atom are NaN.
    """

    plddt: np.ndarray
    ptm: float | None
    iptm: float | None
    pae: np.ndarray | None
    ca: np.ndarray


def write_results(
    targets: Sequence[Target],
    variants: Sequence[Variant],
    predictions: Mapping[str, Sequence[str]],
    output: Path,
    *,
    has_picture: bool = True,
) -> None:
    """Write the table of mutants, the picture of a scan if wanted, and the page with it.

    The wild type is the first target. ``predictions`` has the ``id`` of the predictions of each target, by its name. A
    picture of an earlier table is removed.
    """
    folder = ResultsFolder(output)
    wild_type = _folds(folder, targets[0], predictions)
    rows = []
    for target, variant in zip(targets[1:], variants, strict=True):
        sites = mutated_residues(targets[0], variant)
        mutant = _folds(folder, target, predictions)
        pairs = [(wild_type[key], mutant[key]) for key in wild_type if key in mutant]
        if pairs:
            about = {"mutations": "+".join(map(str, variant)), "name": folder.target(target).stem}
            rows.append(_row(pairs, sites, targets[0]) | about)
    write_atomic(output / TABLE, score_table(COLUMNS, rows))
    picture = _picture(targets[0], variants, rows) if has_picture else None
    if picture is not None:
        write_atomic(output / SCAN, picture)
    else:
        (output / SCAN).unlink(missing_ok=True)
    with suppress(InputError):  # nothing to show if all targets failed
        write_report(output)


def _folds(
    folder: ResultsFolder, target: Target, predictions: Mapping[str, Sequence[str]]
) -> dict[tuple[str, int, str | None], _MutantFold]:
    """Return the folds of a target by network, seed and sample."""
    results, wanted = folder.target(target), predictions.get(target.name, ())
    return {
        (record.scores["model"], record.scores["seed"], record.scores.get("sample")): _read(results, record)
        for record in results.records()
        if record.id in wanted
    }


def _read(results: TargetResults, record: PredictionRecord) -> _MutantFold:
    scores = read_scores(results.path(record, "_scores.json"))
    pae = None
    if "_pae.json" in record.files:
        pae, _ = read_pae(results.path(record, "_pae.json"), len(scores["plddt"]))
    chains = read_structure(results.path(record, ".cif")).chains
    slot = rc.atom_order["CA"]
    known = [np.where(one.mask[:, slot, None] > 0.5, one.positions[:, slot], np.nan) for one in chains]
    ca = np.concatenate(known)
    return _MutantFold(np.array(scores["plddt"], np.float64), scores["ptm"], scores["iptm"], pae, ca)


def _row(
    pairs: Sequence[tuple[_MutantFold, _MutantFold]], sites: np.ndarray, wild_type: Target
) -> dict[str, Any]:
    """Return the scores of a mutant, from pairs of a prediction of the wild type and one of the mutant."""
    each = [_difference(old, new, sites) for old, new in pairs]
    strain = effective_strain(np.stack([old.ca for old, _ in pairs]), np.stack([new.ca for _, new in pairs]))
    row: dict[str, Any] = {name: mean_score(one.get(name) for one in each) for name in _MEANS}
    row |= {"strain": _finite_mean(strain), "strain_site": _finite_mean(strain[sites])}
    row["largest_strain"] = None
    if np.isfinite(strain).any():
        at = int(np.nanargmax(strain))
        row["largest_strain"] = f"{strain[at]:.4f} at {_residue(wild_type, at)}"
    return row | {"predictions": len(pairs)}


def _difference(old: _MutantFold, new: _MutantFold, sites: np.ndarray) -> dict[str, float | None]:
    scores: dict[str, float | None] = {
        "plddt": float(new.plddt.mean()),
        "ptm": new.ptm,
        "dplddt": float((new.plddt - old.plddt).mean()),
        "dplddt_site": float((new.plddt - old.plddt)[sites].mean()),
        "dptm": None if old.ptm is None or new.ptm is None else new.ptm - old.ptm,
        "diptm": None if old.iptm is None or new.iptm is None else new.iptm - old.iptm,
    }
    if old.pae is not None and new.pae is not None:
        change = new.pae.astype(np.float64) - old.pae
        scores["dpae"] = float(change.mean())
        is_site = np.isin(np.arange(len(change)), sites)
        scores["dpae_site"] = float(change[is_site[:, None] | is_site].mean())
    return scores


def _residue(target: Target, index: int) -> str:
    """Return the name of a residue such as ``A24``, in a complex ``B:A24``."""
    for chain in target.chains:
        if index < len(chain.sequence):
            prefix = f"{chain.id}:" if target.is_complex else ""
            return f"{prefix}{chain.sequence[index]}{chain.numbers[index]}"
        index -= len(chain.sequence)
    raise IndexError(index)


def _picture(target: Target, variants: Sequence[Variant], rows: Iterable[Mapping[str, Any]]) -> bytes | None:
    """Return the picture of all single mutants; None without matplotlib or single mutants."""
    by_name = {str(row["mutations"]): row for row in rows}
    single = [one[0] for one in variants if len(one) == 1 and str(one[0]) in by_name]
    if not single or find_spec("matplotlib") is None:
        return None
    places = sorted({(one.chains, one.number, one.old, one.prefix) for one in single})
    columns = {place: k for k, place in enumerate(places)}
    letters = sorted(rc.restypes)
    panels = {}
    for label, key in (
        ("ΔpLDDT of the mutated residue", "dplddt_site"),
        ("mean ΔpLDDT", "dplddt"),
        ("effective strain of the mutated residue", "strain_site"),
    ):
        panels[label] = values = np.full((len(letters), len(places)), np.nan)
        for one in single:
            if (value := by_name[str(one)][key]) is not None:
                at = columns[one.chains, one.number, one.old, one.prefix]
                values[letters.index(one.new), at] = value
    names = [f"{prefix}{old}{number}" for _, number, old, prefix in places]
    wild = [letters.index(old) if old in letters else math.nan for _, _, old, _ in places]
    return scan_png(panels, names, letters, wild, title=f"Mutants of {target.name[:100]}")


def _finite_mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def effective_strain(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute the effective strain ``[N]`` float64 of each residue; NaN without neighbours.

    McBride et al. 2023 (doi:10.1103/PhysRevLett.131.218401). The neighbours of residue i are within 13 Å in all
    structures, and ``r`` are the vectors to their CA atoms, turned onto each other and averaged within a group. The
    strain is the mean of ``|r2 - r1| / |r1|`` after the best rotation of ``r2`` onto ``r1``. CA positions are in Å,
    ``first [A, N, 3]`` of the reference, the wild type for example, and ``second [B, N, 3]``. A residue that is NaN in
    a structure is not a neighbour.
    """
    one, is_near_one = _neighborhoods(torch.from_numpy(np.asarray(first, np.float64)))
    two, is_near_two = _neighborhoods(torch.from_numpy(np.asarray(second, np.float64)))
    shared = (is_near_one & is_near_two).double()
    difference = (_turned(two, one, shared) - one).norm(dim=-1) / one.norm(dim=-1).clamp(min=1e-12)
    return ((difference * shared).sum(-1) / shared.sum(-1)).numpy()


def _neighborhoods(structures: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean vectors ``[N, N, 3]`` from each residue to the others, and the neighbours ``[N, N]``."""
    vectors = structures[:, None, :, :] - structures[:, :, None, :]
    distances = vectors.norm(dim=-1)
    is_near = ((distances > 0) & (distances <= NEIGHBORS_WITHIN)).all(0)
    vectors = vectors.nan_to_num()
    shared = is_near.double()
    turned = [vectors[0], *(_turned(other, vectors[0], shared) for other in vectors[1:])]
    return torch.stack(turned).mean(0), is_near


def _turned(moving: Tensor, fixed: Tensor, weights: Tensor) -> Tensor:
    """Turn vectors ``[N, N, 3]`` of each residue onto their partners, by those of weight 1."""
    covariance = torch.einsum("ij,ija,ijb->iab", weights, fixed, moving)
    return torch.einsum("iab,ijb->ija", best_rotation(covariance), moving)
