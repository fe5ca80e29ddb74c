"""Structure to be scored: its sequences, and its template without side chains and sequence (AF2Rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import SCORE, ObservedStructure, read_observed
from fastfold.protein.structure import ChainStructure

Features = Mapping[str, np.ndarray]
S = TypeVar("S", bound=ChainStructure)
Use = Literal["template", "initial_guess"]
"""Ways to show a structure to a network: as AF2Rank's template, or as the recycled positions of the first pass."""

_BACKBONE = ("N", "CA", "C")
_SHOWN = 5  #: Number of atoms of atom37 up to O: N, CA, C, CB, O
_CB_LENGTH, _CB_ANGLE, _CB_DIHEDRAL = 1.522, 1.927, -2.143
"""Bond CA-CB in Å, angle N-CA-CB and dihedral C-N-CA-CB in radians, as in AF2Rank."""


@dataclass(frozen=True)
class GivenStructure:
    """Structure that a network scores."""

    path: Path  #: PDB or mmCIF file
    use: Use  #: How the network sees it
    #: For an initial guess, show all chains but the first as a template with sequence and side chains, as
    #: dl_binder_design does for the target of a binder
    shows_targets: bool = False

    def read(self, *, whole: bool = False) -> ObservedStructure:
        """Read the file; see :func:`fastfold.protein.io.observed.read_observed`."""
        return read_observed(self.path, SCORE, whole=whole)

    @property
    def needs_templates(self) -> bool:
        """True if the network must take templates."""
        return self.use == "template" or self.shows_targets

    def templates(self) -> tuple[Features, ...] | None:
        """Return raw template features per chain; None without templates."""
        if not self.needs_templates:
            return None
        structure = self.read(whole=True)
        name = structure.name.encode()
        if self.use == "template":
            features = [masked_template(chain, name) for chain in structure.chains]
        else:
            first, *targets = structure.chains
            features = [empty_template(len(first), name)]
            features += [whole_template(one, name) for one in targets]
        return in_one_frame(features) if len(features) > 1 else tuple(features)


def in_one_frame(features: Sequence[Features]) -> tuple[Features, ...]:
    """Return a template of each chain, marked as parts of one structure."""
    return tuple({**one, "template_frame": np.array([1], np.int32)} for one in features)


def empty_template(length: int, name: bytes) -> dict[str, np.ndarray]:
    """Return a template without letters and atoms; the features are raw."""
    atoms = len(rc.atom_types)
    return _features("-" * length, np.zeros((length, atoms, 3)), np.zeros((length, atoms)), name)


def whole_template(chain: ChainStructure, name: bytes) -> dict[str, np.ndarray]:
    """Return a chain as its own template, with all letters and atoms; the features are raw."""
    return _features(chain.sequence, chain.positions, chain.mask, name)


def masked_template(chain: ChainStructure, name: bytes) -> dict[str, np.ndarray]:
    """Return AF2Rank's template of a chain: gaps as its sequence, N, CA, C, O and CB as its atoms.

    Roney & Ovchinnikov 2022 (doi:10.1103/PhysRevLett.129.238101). Every residue with a whole backbone gets a CB, so
    that glycines are not revealed. The features are raw (:func:`fastfold.data.features.raw.template_features`).
    """
    whole = with_virtual_cb(chain)
    mask = whole.mask * (np.arange(rc.atom_type_num) < _SHOWN)
    return _features("-" * len(chain), whole.positions, mask, name)


def with_virtual_cb(chain: S) -> S:
    """Return a chain with ideal CB atoms where residues have N, CA and C but no CB."""
    positions, mask = chain.positions.copy(), chain.mask.copy()
    cb = rc.atom_order["CB"]
    n, ca, c = (rc.atom_order[atom] for atom in _BACKBONE)
    absent = (mask[:, [n, ca, c]].min(-1) > 0) & (mask[:, cb] == 0)
    positions[absent, cb] = virtual_cb(*(positions[absent, atom] for atom in (n, ca, c)))
    mask[absent, cb] = 1.0
    return replace(chain, positions=positions, mask=mask)


def virtual_cb(n: np.ndarray, ca: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return ideal CB positions ``[*, 3]`` from the backbone ``[*, 3]``, in Å, with AF2Rank's geometry."""
    along = _unit(n - ca)
    normal = _unit(np.cross(n - c, along))
    across = np.cross(normal, along)
    radius = _CB_LENGTH * np.sin(_CB_ANGLE)
    return (
        ca
        + _CB_LENGTH * np.cos(_CB_ANGLE) * along
        + radius * np.cos(_CB_DIHEDRAL) * across
        - radius * np.sin(_CB_DIHEDRAL) * normal
    )


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.sqrt(np.square(vectors).sum(-1, keepdims=True) + 1e-8)


def _features(letters: str, positions: np.ndarray, mask: np.ndarray, name: bytes) -> dict[str, np.ndarray]:
    ids = [rc.hhblits_letter_to_id[letter] for letter in letters]
    return {
        "template_aatype": np.eye(22, dtype=np.float32)[ids][None],
        "template_all_atom_positions": (positions * mask[..., None]).astype(np.float32)[None],
        "template_all_atom_masks": mask.astype(np.float32)[None],
        "template_sum_probs": np.zeros((1, 1), np.float32),
        "template_domain_names": np.array([name]),
    }
