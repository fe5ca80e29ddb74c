"""One energy minimisation: Amber99sb in vacuum, with position restraints on heavy atoms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import openmm
from openmm import app, unit

from fastfold.inference.relax.caps import CAPS
from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.relax.platforms import ChosenPlatform
from fastfold.inference.relax.prepare import PreparedStructure
from fastfold.inference.relax.stereo import MAX_TWIST
from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import dihedrals
from fastfold.protein.validation.covalent import CHIRAL_CENTERS

_KJ_PER_KCAL = 4.184
_MOST_ATTEMPTS = 10  #: Attempts for which the minimiser has iterations; four are usual
_FIRST_TOLERANCE = 0.7  #: Part of the tolerance for the minimisation without constraints
_WORKING_TOLERANCE = 1e-3
"""Relative error of constrained bonds at which the minimiser stops trying harder springs."""
_BOND_TOLERANCE = 1e-5  #: Largest relative error of constrained bonds in the result
_RESTRAINTS, _GUARDS = 1, 2
"""Force groups of restraints and of guards, which are zero for a valid structure; the force field is group 0."""
_force_field = cache(app.ForceField)

_LEAST_VOLUME = 1.0
"""Triple product of a chiral carbon's bonds in Å³ below which it is pulled back; 2.6 is usual, 0 is flat."""
_MAX_PLANAR = 30.0  #: Degrees from cis or trans up to which an initial peptide bond counts as planar
_TWIST_OF_PLANAR, _TWIST_OF_FREE, _TWIST_OF_HELD = 25.0, 30.0, 90.0
"""Degrees from cis or trans within which peptide bonds are force-free: planar ones, of free and of other residues."""
_HELIX = (-70.0, 38.0), (-40.0, 38.0)
_STRAND = (-105.0, 73.0), (145.0, 63.0)
_LEFT_OF_ZERO = ((-90.0, 80.0),)
"""Degrees around which phi and psi of residues in helices and strands, and phi of others below 0, are kept.

Each has the largest deviation at which it is force-free. They are just within the regions of
:func:`fastfold.protein.metrics.backbone.in_helix_or_strand`.
"""
_PLANE_STIFFNESS = 1000.0  #: Force constant of springs on omega and phi, in kJ/mol/rad²
_HAND_STIFFNESS = 500.0  #: Force constant of the pull on chiral carbons, in kJ/mol/Å⁶


@dataclass(frozen=True)
class Minimized:
    """Result of one minimisation: positions ``[A, 3]`` float64 in Å, and energies in kJ/mol without the restraints'.

    Iterations are those of all attempts of the minimiser; ``limit_reached`` if the limit ended the last one.
    """

    positions: np.ndarray
    energy_before: float
    energy_after: float
    restraint_energy: float
    iterations: int
    limit_reached: bool


class _Counter(openmm.MinimizationReporter):
    """Counter of iterations, in all and in the last attempt, which ends attempts at the limit.

    The minimiser treats constraints as springs. If they were too soft, it tries again with harder ones, perhaps from
    the start. A limit on all iterations together could therefore leave the initial structure.
    """

    def __init__(self, limit: int, on_iteration: Callable[[int], None]) -> None:
        super().__init__()
        self.on_iteration = on_iteration
        self.limit, self.iterations, self.of_attempt = limit, 0, 0

    def report(self, iteration: int, x: Any, grad: Any, args: Any) -> bool:
        self.iterations += 1
        self.of_attempt = iteration + 1
        self.on_iteration(self.iterations)
        return self.iterations >= self.limit


def minimize(
    prepared: PreparedStructure,
    config: RelaxConfig,
    platform: ChosenPlatform,
    *,
    free_residues: Collection[int] = (),
    on_iteration: Callable[[int], None] = lambda iterations: None,
) -> Minimized:
    """Minimise the energy without a cutoff, first with flexible and then with constrained bonds to hydrogens.

    Constraints are stiff springs, which slow the minimiser down far from a minimum. Springs that keep peptide bonds
    planar are removed at last. Atoms of ``free_residues``, by
    their indices in the protein's arrays, are not restrained. ``on_iteration`` gets the number of iterations. A
    ValueError tells that the force field lacks parameters, an ``openmm.OpenMMException`` that an energy or force is not
    finite.
    """
    start = prepared.positions / 10.0  # nm
    counter = _Counter(_MOST_ATTEMPTS * config.max_iterations, on_iteration)
    flexible, _ = _context(prepared, config, platform, start, free_residues, constraints=None)
    _descend(flexible, start, replace(config, tolerance=_FIRST_TOLERANCE * config.tolerance), counter)
    positions = flexible.getState(positions=True).getPositions(asNumpy=True)
    del flexible
    context, guard = _context(prepared, config, platform, start, free_residues, constraints=app.HBonds)
    context.setPositions(start)
    energy_before = _energy(context, {0})
    _descend(context, positions, config, counter)
    _release_planes(context, guard, config, counter)
    context.applyConstraints(_BOND_TOLERANCE)
    positions = context.getState(positions=True).getPositions(asNumpy=True).value_in_unit(unit.angstrom)
    return Minimized(
        positions=np.asarray(positions, np.float64),
        energy_before=energy_before,
        energy_after=_energy(context, {0}),
        restraint_energy=_energy(context, {_RESTRAINTS}),
        iterations=counter.iterations,
        limit_reached=counter.of_attempt >= config.max_iterations,
    )


def _context(
    prepared: PreparedStructure,
    config: RelaxConfig,
    platform: ChosenPlatform,
    start: np.ndarray,
    free_residues: Collection[int],
    *,
    constraints: Any,
) -> tuple[Any, OmegaGuard]:
    system = _force_field("amber99sb.xml").createSystem(prepared.topology, constraints=constraints)
    system.addForce(_restraints(prepared, start, config.stiffness, free_residues))
    system.addForce(_chirality_guard(prepared))
    system.addForce(_torsion_guard(prepared))
    guard = OmegaGuard(prepared, free_residues)
    system.addForce(guard.force)
    integrator = openmm.VerletIntegrator(0.001)  # required by a context, and not used
    integrator.setConstraintTolerance(_WORKING_TOLERANCE)
    return openmm.Context(system, integrator, platform.platform, platform.properties), guard


def _descend(context: Any, positions: Any, config: RelaxConfig, counter: _Counter) -> None:
    context.setPositions(positions)
    tolerance = config.tolerance * _KJ_PER_KCAL  # kJ/mol/nm
    openmm.LocalEnergyMinimizer.minimize(context, tolerance, config.max_iterations, counter)


def _release_planes(context: Any, guard: OmegaGuard, config: RelaxConfig, counter: _Counter) -> None:
    """Minimise without springs on planar peptide bonds; they come back at bonds that would twist otherwise."""
    held = context.getState(positions=True).getPositions(asNumpy=True)
    if not guard.bonds_beyond(guard.planar_tolerance, held):
        return  # no spring acts, so this is a minimum without them
    guard.release(context)
    twisted = set[int]()
    while counter.iterations < counter.limit:
        _descend(context, held, config, counter)
        loose = context.getState(positions=True).getPositions(asNumpy=True)
        more = set(guard.bonds_beyond(_MAX_PLANAR, loose)) - twisted
        if not more:
            return
        guard.hold(context, more)
        twisted |= more
    context.setPositions(held)


def _restraints(
    prepared: PreparedStructure, start: np.ndarray, stiffness: float, free_residues: Collection[int]
) -> Any:
    """Return springs that hold heavy atoms at their initial positions."""
    force = openmm.CustomExternalForce("0.5 * k * ((x - x0)^2 + (y - y0)^2 + (z - z0)^2)")
    force.addGlobalParameter("k", stiffness * _KJ_PER_KCAL * 100.0)  # kJ/mol/nm²
    for name in ("x0", "y0", "z0"):
        force.addPerParticleParameter(name)
    is_free = np.isin(prepared.residue_of, sorted(free_residues)) | (prepared.residue_of < 0)
    held = ~prepared.is_hydrogen & ~is_free
    for atom in np.flatnonzero(held).tolist():
        force.addParticle(atom, start[atom].tolist())
    force.setForceGroup(_RESTRAINTS)
    return force


def _chirality_guard(prepared: PreparedStructure) -> Any:
    """Return springs that prevent a change of handedness of chiral carbons; zero otherwise."""
    volume = "(x2-x1)*((y3-y1)*(z4-z1)-(z3-z1)*(y4-y1))"
    volume += "+(y2-y1)*((z3-z1)*(x4-x1)-(x3-x1)*(z4-z1))+(z2-z1)*((x3-x1)*(y4-y1)-(y3-y1)*(x4-x1))"
    energy = f"{_HAND_STIFFNESS}*min(0, hand*1000*volume-{_LEAST_VOLUME})^2; volume={volume}"
    force = openmm.CustomCompoundBondForce(4, energy)
    force.addPerBondParameter("hand")
    centers = {
        (rc.restype_1to3[letter], name): neighbors
        for letters, name, neighbors in CHIRAL_CENTERS
        for letter in letters
    }
    for residue in prepared.topology.residues():
        index = {atom.name: atom.index for atom in residue.atoms()}
        for name in ("CA", "CB"):
            if neighbors := centers.get((residue.name, name)):
                atoms = [index[atom] for atom in (name, *neighbors)]
                a, b, c = prepared.positions[atoms[1:]] - prepared.positions[atoms[0]]
                force.addBond(atoms, [float(np.sign(np.dot(np.cross(a, b), c)))])
    force.setForceGroup(_GUARDS)
    return force


def _torsion_guard(prepared: PreparedStructure) -> Any:
    """Return springs that keep residues other than glycine in the region of phi and psi that they start in.

    They are zero within the region: a helix, a strand, or phi below 0.
    """
    force = openmm.CustomTorsionForce(
        f"{_PLANE_STIFFNESS}*max(0, off-reach)^2; off=min(turn, {2 * math.pi}-turn); turn=abs(theta-centre)"
    )
    for name in ("centre", "reach"):
        force.addPerTorsionParameter(name)
    next_n = {first["C"]: second["N"] for first, second, _ in _peptide_bonds(prepared)}
    for before, residue, name in _peptide_bonds(prepared):
        if name == "GLY":
            continue
        phi = [before["C"], residue["N"], residue["CA"], residue["C"]]
        torsions = [phi]
        if residue["C"] in next_n:
            torsions.append([residue["N"], residue["CA"], residue["C"], next_n[residue["C"]]])
        angles = [float(dihedrals(*prepared.positions[atoms])) for atoms in torsions]
        for atoms, (center, reach) in zip(torsions, _region(angles), strict=False):
            force.addTorsion(*atoms, [math.radians(center), math.radians(reach)])
    force.setForceGroup(_GUARDS)
    return force


def _region(angles: Sequence[float]) -> Sequence[tuple[float, float]]:
    """Return the centres and reaches of the region that phi and psi are in, in degrees; none for phi above 0."""
    for region in (_HELIX, _STRAND):
        limits = zip(angles, region, strict=False)
        is_within = all(abs((x - center + 180) % 360 - 180) <= reach for x, (center, reach) in limits)
        if len(angles) == 2 and is_within:
            return region
    return _LEFT_OF_ZERO if angles[0] < 0.0 else ()


def _peptide_bonds(prepared: PreparedStructure) -> Iterator[tuple[dict[str, int], dict[str, int], str]]:
    """Yield atoms by name of both residues of each peptide bond, and the name of the second one; without caps."""
    for chain in prepared.topology.chains():
        residues = [r for r in chain.residues() if r.name not in CAPS]
        for before, residue in itertools.pairwise(residues):
            first, second = ({atom.name: atom.index for atom in r.atoms()} for r in (before, residue))
            yield first, second, residue.name


class OmegaGuard:
    """Springs that keep planar peptide bonds planar and trans ones trans, and untwist those of free residues."""

    def __init__(self, prepared: PreparedStructure, free_residues: Collection[int]) -> None:
        self.force = openmm.CustomTorsionForce(
            f"acts*{_PLANE_STIFFNESS}*max(0, twist-tolerance)^2; "
            f"twist=select(is_cis, abs(theta), {math.pi}-abs(theta))"
        )
        self.planar_tolerance = _TWIST_OF_PLANAR
        # Atoms of initially planar bonds by the numbers of their springs.
        self._planar: dict[int, list[int]] = {}
        for name in ("is_cis", "tolerance", "acts"):
            self.force.addPerTorsionParameter(name)
        for first, second, _ in _peptide_bonds(prepared):
            atoms = [first["CA"], first["C"], second["N"], second["CA"]]
            omega = abs(float(dihedrals(*prepared.positions[atoms])))
            is_cis = omega < MAX_TWIST
            is_free = {int(i) for i in prepared.residue_of[atoms]} <= set(free_residues)
            is_planar = min(omega, 180.0 - omega) < _MAX_PLANAR
            if is_planar:
                tolerance = _TWIST_OF_PLANAR
            elif is_free:
                tolerance = _TWIST_OF_FREE
            elif not is_cis:
                tolerance = _TWIST_OF_HELD
            else:
                continue
            number = self.force.addTorsion(*atoms, [float(is_cis), math.radians(tolerance), 1.0])
            if is_planar:
                self._planar[number] = atoms
        self.force.setForceGroup(_GUARDS)

    def bonds_beyond(self, degrees: float, positions: Any) -> list[int]:
        """Return the springs of initially planar bonds further from cis and trans at ``positions [A, 3]``."""
        xyz = np.asarray(positions.value_in_unit(unit.angstrom))
        numbers = np.array(list(self._planar), np.int64)
        atoms = np.array(list(self._planar.values()), np.int64).reshape(-1, 4)
        omega = np.abs(dihedrals(*xyz[atoms.T]))
        return [int(number) for number in numbers[np.minimum(omega, 180.0 - omega) > degrees]]

    def release(self, context: Any) -> None:
        """Remove the springs of initially planar bonds."""
        self._set(context, self._planar, acts=0.0)

    def hold(self, context: Any, numbers: Iterable[int]) -> None:
        """Add these springs again."""
        self._set(context, numbers, acts=1.0)

    def _set(self, context: Any, numbers: Iterable[int], *, acts: float) -> None:
        for number in numbers:
            *atoms, (is_cis, tolerance, _) = self.force.getTorsionParameters(number)
            self.force.setTorsionParameters(number, *atoms, [is_cis, tolerance, acts])
        self.force.updateParametersInContext(context)


def _energy(context: Any, groups: set[int]) -> float:
    energy = context.getState(energy=True, groups=groups).getPotentialEnergy()
    return float(energy.value_in_unit(unit.kilojoules_per_mole))
