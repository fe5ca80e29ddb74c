"""Read the predictions of one target as an ensemble of structures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fastfold.errors import ConfigError, InputError
from fastfold.inference.output.file_names import sample_label
from fastfold.inference.output.score_files import residue_numbers, scored_names
from fastfold.inference.report.discover import FoundPrediction, find_predictions
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.labels import AuthorNames
from fastfold.protein.metrics.chain_mapping import ChainCandidates, equal_chains, order_copies
from fastfold.protein.protein import Protein
from fastfold.protein.structure import structure_to_protein
from fastfold.utils.lazy import old_attributes

SMALLEST = 3  #: Smallest number of predictions of an ensemble


@old_attributes({"found": "prediction"})
@dataclass(frozen=True)
class Member:
    """Prediction of an ensemble."""

    prediction: FoundPrediction  #: The prediction and its files
    protein: Protein  #: Its structure; copies of a chain are in the order that fits the first member
    #: Number of each chain in the files, ``[C]``, and place of each residue, ``[N]``
    chain_order: np.ndarray
    residue_order: np.ndarray

    @property
    def name(self) -> str:
        """Common beginning of the file names."""
        return self.prediction.stem

    @property
    def sample(self) -> str:
        """Method and number of the sample; empty for a prediction without sampling."""
        values = self.prediction.scores.get("sample")
        return sample_label(values) if isinstance(values, dict) else ""

    @property
    def chains(self) -> list[str]:
        """Name of each chain in the files."""
        names = scored_names(self.prediction.scores).chain_ids
        return [names[number] for number in self.chain_order]

    @property
    def plddt(self) -> np.ndarray:
        """PLDDT ``[N]`` of the residues, 0 to 100."""
        return np.asarray(self.prediction.scores["plddt"], np.float64)[self.residue_order]

    @property
    def mean_plddt(self) -> float:
        """Mean pLDDT of all residues."""
        return float(np.mean(self.prediction.scores["plddt"]))


@dataclass(frozen=True)
class Ensemble:
    """Predictions of one target by rank, ``M`` structures of the same ``N`` residues, and the stem of its files."""

    target: str
    members: Sequence[Member]

    @property
    def lengths(self) -> list[int]:
        """Number of residues of each chain."""
        return [len(sequence) for sequence in self.members[0].prediction.scores["sequences"]]

    @property
    def numbers(self) -> np.ndarray:
        """Residue numbers ``[N]`` in the whole proteins, from 1."""
        return residue_numbers(self.members[0].prediction.scores)

    @property
    def names(self) -> AuthorNames:
        """Names of chains and residues in files."""
        return scored_names(self.members[0].prediction.scores)

    @cached_property
    def present(self) -> np.ndarray:
        """Residues ``[K]`` with a CA atom in all structures."""
        masks = [member.protein.atom_mask[:, rc.atom_order["CA"]] > 0.5 for member in self.members]
        return np.flatnonzero(np.all(masks, axis=0))

    @cached_property
    def copies(self) -> ChainCandidates:
        """Chains that are exchangeable, with places among the present residues."""
        protein = self.members[0].protein
        letters = np.array(list("".join(protein.sequences)))[self.present]
        chain = protein.chain_index[self.present]
        return equal_chains(["".join(letters[chain == number]) for number in np.unique(chain)])

    @cached_property
    def ca(self) -> np.ndarray:
        """CA positions ``[M, K, 3]`` float64 in Å of the present residues."""
        ca = rc.atom_order["CA"]
        positions = [member.protein.atom_positions[self.present, ca] for member in self.members]
        return np.stack(positions).astype(np.float64)


def read_ensembles(directory: Path, *, target: str | None = None, min_plddt: float = 0.0) -> list[Ensemble]:
    """Read the ensembles of a folder of results, one per target with at least three predictions.

    ``target`` is the name of one target, by its record or its files; None for all. Predictions of lower mean pLDDT are
    left out. A ConfigError tells that no target has this name, an InputError that none has enough readable predictions.
    """
    predictions = find_predictions(directory)
    by_target: dict[str, list[FoundPrediction]] = {}
    for one in predictions:
        if target in (None, one.target, one.scores["name"]):
            by_target.setdefault(one.target, []).append(one)
    if target is not None and not by_target:
        names = ", ".join(repr(name) for name in dict.fromkeys(one.target for one in predictions))
        raise ConfigError(f"`target`: {directory} has no target {target!r}; it has {names or 'none'}")
    kept = {
        name: [one for one in group if np.mean(one.scores["plddt"]) >= min_plddt]
        for name, group in by_target.items()
    }
    if not any(len(group) >= SMALLEST for group in kept.values()):
        most = max(map(len, kept.values()), default=0)
        of = f" of mean pLDDT {min_plddt:g} or more" if min_plddt else ""
        raise InputError(
            f"an ensemble needs at least {SMALLEST} predictions{of} of one target, found {most}; fold more with "
            "fastfold infer --sample",
            path=directory,
        )
    return [Ensemble(name, _members(group)) for name, group in kept.items() if len(group) >= SMALLEST]


def _members(predictions: Sequence[FoundPrediction]) -> list[Member]:
    members: list[Member] = []
    for prediction in predictions:
        path = prediction.files.get(".cif") or prediction.files.get(".pdb")
        if path is None:
            raise InputError("has no structure file; fold it again", path=prediction.stem)
        protein = structure_to_protein(read_structure(path))
        if [len(one) for one in protein.sequences] != [len(one) for one in prediction.scores["sequences"]]:
            raise InputError("has other chains than the scores file; fold it again", path=path)
        protein = replace(protein, residue_index=residue_numbers(prediction.scores))
        if members and protein.sequences != members[0].protein.sequences:
            raise InputError(
                f"expected the chains of {members[0].name}, found others; analyse targets in separate folders",
                path=path,
            )
        members.append(_in_order(prediction, protein, members[0].protein if members else protein))
    return members


def _in_order(prediction: FoundPrediction, protein: Protein, first: Protein) -> Member:
    """Order copies of a chain by the mapping onto the first member that has the largest TM-score."""
    ca = rc.atom_order["CA"]
    points = [torch.from_numpy(one.atom_positions[:, ca]) for one in (protein, first)]
    masks = [torch.from_numpy(one.atom_mask[:, ca]) for one in (protein, first)]
    chain_order, order = order_copies(protein.sequences, *points, *masks)
    ordered = replace(
        protein,
        atom_positions=protein.atom_positions[order],
        atom_mask=protein.atom_mask[order],
        b_factors=protein.b_factors[order],
    )
    return Member(prediction, ordered, chain_order, order)
