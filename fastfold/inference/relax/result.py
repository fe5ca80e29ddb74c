"""``RelaxResult``: the result of a relaxation, its record, and its structure with hydrogens as PDB and ModelCIF."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastfold._version import __version__
from fastfold.errors import OutputError
from fastfold.inference.output.score_files import rounded_tree
from fastfold.inference.relax.stereo import Violation
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Hydrogens, Protein

_SHOWN_BREAKS = 5  #: Number of chain breaks that a summary names


@dataclass(frozen=True)
class BondedCysteines:
    """Two residues with a disulfide bond."""

    indices: tuple[int, int]  #: Indices in the protein's arrays
    residues: tuple[str, str]  #: Names, for example ``CYS 3 of chain A``


@dataclass(frozen=True, eq=False)
class RelaxResult:
    """Result of a relaxation.

    Energies are potential energies of Amber99sb in vacuum, of all atoms with hydrogens, in kJ/mol, without the energy
    of the restraints.

    Example:
        >>> import fastfold
        >>> from fastfold.inference.relax import relax
        >>> result = relax(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).protein)
        >>> result.protein is not None, result.reason
        (True, '')
    """

    protein: Protein  #: Final heavy atoms; the input if the minimiser failed
    platform: str  #: OpenMM's platform, for example ``CPU (1 thread)``
    violations_before: tuple[Violation, ...]  #: Residues of the input with a violation of stereochemistry
    violations: tuple[Violation, ...]  #: Residues of the result with a violation
    hydrogens: Hydrogens | None = None  #: Final hydrogens; None if the minimiser failed
    reason: str = ""  #: Reason why the structure is not relaxed; empty if it is
    #: Energy of the input with added hydrogens and missing atoms; None if it was not computed
    energy_before: float | None = None
    energy_after: float | None = None  #: Energy of the result; None if the minimiser failed
    restraint_energy: float | None = None  #: Energy of the restraints at the end, in kJ/mol
    heavy_atom_rmsd: float | None = None  #: Movement of the input's heavy atoms in Å, without superposition
    rounds: int = 0  #: Rounds of minimisation
    iterations: int = 0  #: Iterations of the minimiser in all rounds
    iteration_limit_reached: bool = False  #: True if the limit ended the last attempt of the last round
    residues_freed: int = 0  #: Residues without restraints in the last round
    atoms_added: int = 0  #: Number of added heavy atoms
    seconds: float = 0.0  #: Seconds of the relaxation
    #: Neighbours in a chain of the input that no bond joins, with their distance
    chain_breaks: tuple[str, ...] = ()
    capped: tuple[str, ...] = ()  #: Residues without a bond to another one, which had caps in the force field
    disulfides: tuple[BondedCysteines, ...] = ()  #: Disulfide bonds of the force field
    #: Residues whose side chains were placed again, because a bond passed through a ring
    side_chains_rebuilt: tuple[str, ...] = ()
    pierced_rings: tuple[str, ...] = ()  #: Rings of the result that a bond passes through, with the bond
    #: Figures of the check of the input's geometry by name
    geometry_before: Mapping[str, float | int | None] | None = None
    #: The same of the result; None if the minimiser failed
    geometry: Mapping[str, float | int | None] | None = None

    @property
    def minimized(self) -> bool:
        """True if a structure can be written, relaxed or not."""
        return self.hydrogens is not None

    @property
    def relaxed(self) -> bool:
        """True if the energy is negative, and no violation and no pierced ring remain."""
        return not self.reason

    def to_dict(self) -> dict[str, Any]:
        """Return the record for a scores file, in JSON's types; only ``seconds`` varies between runs."""
        return {
            "relaxed": self.relaxed,
            "reason": self.reason,
            "platform": self.platform,
            "energy_before_kj_per_mol": _rounded(self.energy_before, 2),
            "energy_after_kj_per_mol": _rounded(self.energy_after, 2),
            "restraint_energy_kj_per_mol": _rounded(self.restraint_energy, 2),
            "heavy_atom_rmsd_angstrom": _rounded(self.heavy_atom_rmsd, 4),
            "violating_residues_before": len(self.violations_before),
            "violating_residues": [{**asdict(one), "kinds": list(one.kinds)} for one in self.violations],
            "rounds": self.rounds,
            "iterations": self.iterations,
            "iteration_limit_reached": self.iteration_limit_reached,
            "residues_freed": self.residues_freed,
            "heavy_atoms_added": self.atoms_added,
            "chain_breaks": list(self.chain_breaks),
            "capped": list(self.capped),
            "disulfides": [
                {"indices": list(bond.indices), "residues": list(bond.residues)} for bond in self.disulfides
            ],
            "side_chains_rebuilt": list(self.side_chains_rebuilt),
            "pierced_rings": list(self.pierced_rings),
            "geometry_before": rounded_tree(self.geometry_before, 4),
            "geometry": rounded_tree(self.geometry, 4),
            "seconds": round(self.seconds, 2),
        }

    def __str__(self) -> str:
        """Summarise the result in one sentence."""
        if self.energy_after is None or self.energy_before is None:
            return f"not relaxed on {self.platform}: {self.reason}"
        what = (
            f"{self.energy_before:,.0f} to {self.energy_after:,.0f} kJ/mol, heavy atoms moved by "
            f"{self.heavy_atom_rmsd:.2f} Å (RMSD), {self.rounds} round{'s' * (self.rounds != 1)} of "
            f"{self.iterations:,} iterations on {self.platform}, {self.seconds:.0f} s"
        )
        if self.chain_breaks:
            more = len(self.chain_breaks) - _SHOWN_BREAKS
            what += f"; chain broken between {', '.join(self.chain_breaks[:_SHOWN_BREAKS])}"
            what += f" and at {more} more places" if more > 0 else ""
        if self.capped:
            what += f"; capped, as not bonded to another residue: {', '.join(self.capped)}"
        if self.disulfides:
            what += f"; disulfide bonds {', '.join(' - '.join(bond.residues) for bond in self.disulfides)}"
        if self.side_chains_rebuilt:
            what += f"; side chains placed again to free rings: {', '.join(self.side_chains_rebuilt)}"
        return f"relaxed: {what}" if self.relaxed else f"not relaxed: {self.reason} ({what})"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), digits) + 0.0


def relaxed_pdb(result: RelaxResult, *, title: str, names: AuthorNames | None = None) -> str:
    """Format the structure as a PDB file, whose title tells if it is not relaxed; errors as of :meth:`.to_pdb`."""
    return to_pdb(
        result.protein,
        title=_title(result, title),
        hydrogens=result.hydrogens,
        disulfides=[bond.indices for bond in result.disulfides],
        names=names,
    )


def relaxed_mmcif(
    result: RelaxResult, *, title: str, entry_id: str, names: AuthorNames | None = None, **prediction: Any
) -> str:
    """Format the structure as ModelCIF, with relaxation as a step of its protocol; errors as :func:`relaxed_pdb`.

    Further arguments, for a predicted structure, are ``model_name``, ``is_multimer``, ``plddt``, ``pae``,
    ``ptm``, ``iptm`` and ``details`` of
    :func:`~fastfold.protein.io.modelcif_writer.to_modelcif`.
    """
    title = _title(result, title)
    import openmm

    how = "restrained minimisation" if result.relaxed else "restrained minimisation without success"
    options: dict[str, Any] = {"model_name": "relaxed", "plddt": None} | prediction
    return to_modelcif(
        result.protein,
        entry_id=entry_id,
        title=title,
        software_version=__version__,
        refinement=f"Amber99sb, {how}, OpenMM {openmm.__version__} on {result.platform}, {result.rounds} rounds",
        hydrogens=result.hydrogens,
        names=names,
        **options,
    )


def _title(result: RelaxResult, title: str) -> str:
    if not result.minimized:
        raise OutputError(f"the relaxation gave no structure to write: {result.reason}")
    return f"{title}, relaxed" if result.relaxed else f"{title}, minimised but not relaxed: {result.reason}"
