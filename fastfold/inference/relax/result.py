"""``RelaxResult``: what came out of a relaxation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fastfold.inference.relax.violations import Violation
from fastfold.protein.hydrogens import Hydrogens
from fastfold.protein.protein import Protein


@dataclass(frozen=True, eq=False)
class RelaxResult:
    """What a relaxation made of a structure.

    Energies are potential energies of Amber99sb in vacuum, of all atoms with hydrogens, in kJ/mol, without the energy
    of the restraints.

    Attributes:
        protein: The structure as far as the relaxation came, heavy atoms alone: the input where the minimiser failed.
        hydrogens: Its hydrogens; None where the minimiser failed.
        reason: Why the structure does not count as relaxed; empty if it does.
        platform: Where it was minimised, ``CPU (1 thread)`` for example.
        energy_before: Of the input with its hydrogens and missing atoms added; None if there was none to compute.
        energy_after: Of the result; None where the minimiser failed.
        restraint_energy: Of the restraints at the end, in kJ/mol.
        heavy_atom_rmsd: How far the heavy atoms of the input moved, in Å, without superposition.
        violations_before: Residues of the input with a violation of stereochemistry.
        violations: Residues of the result with one.
        rounds: Rounds of minimisation.
        iterations: Iterations of the minimiser in all rounds.
        iteration_limit_reached: Whether the last attempt of the last round was ended by the limit.
        residues_freed: Residues without restraints in the last round.
        atoms_added: Heavy atoms that the input lacked.
        seconds: Time taken.
        chain_breaks: Pairs of residues with consecutive numbers that are not bonded, with their distance.
    """

    protein: Protein
    hydrogens: Hydrogens | None
    reason: str
    platform: str
    energy_before: float | None
    energy_after: float | None
    restraint_energy: float | None
    heavy_atom_rmsd: float | None
    violations_before: tuple[Violation, ...]
    violations: tuple[Violation, ...]
    rounds: int
    iterations: int
    iteration_limit_reached: bool
    residues_freed: int
    atoms_added: int
    seconds: float
    chain_breaks: tuple[str, ...] = ()

    @property
    def minimized(self) -> bool:
        """Whether there is a structure to write, relaxed or not."""
        return self.hydrogens is not None

    @property
    def relaxed(self) -> bool:
        """Whether the energy is negative and no violation remains."""
        return not self.reason

    def to_dict(self) -> dict[str, Any]:
        """The record for a scores file, in JSON's types; units are in the names. ``seconds`` alone varies."""
        return {
            "relaxed": self.relaxed,
            "reason": self.reason,
            "platform": self.platform,
            "energy_before_kj_per_mol": _rounded(self.energy_before, 2),
            "energy_after_kj_per_mol": _rounded(self.energy_after, 2),
            "restraint_energy_kj_per_mol": _rounded(self.restraint_energy, 2),
            "heavy_atom_rmsd_angstrom": _rounded(self.heavy_atom_rmsd, 4),
            "violating_residues_before": len(self.violations_before),
            "violating_residues": [_plain(violation) for violation in self.violations],
            "rounds": self.rounds,
            "iterations": self.iterations,
            "iteration_limit_reached": self.iteration_limit_reached,
            "residues_freed": self.residues_freed,
            "heavy_atoms_added": self.atoms_added,
            "chain_breaks": list(self.chain_breaks),
            "seconds": round(self.seconds, 2),
        }

    def __str__(self) -> str:
        """One sentence for a person."""
        if self.energy_after is None or self.energy_before is None:
            return f"not relaxed on {self.platform}: {self.reason}"
        what = (
            f"{self.energy_before:,.0f} to {self.energy_after:,.0f} kJ/mol, heavy atoms moved by "
            f"{self.heavy_atom_rmsd:.2f} Å (RMSD), {self.rounds} rounds of {self.iterations:,} iterations on "
            f"{self.platform}, {self.seconds:.0f} s"
        )
        if self.chain_breaks:
            what += f"; chain broken between {', '.join(self.chain_breaks)}"
        return f"relaxed: {what}" if self.relaxed else f"not relaxed: {self.reason} ({what})"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), digits) + 0.0


def _plain(violation: Violation) -> dict[str, Any]:
    return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(violation).items()}
