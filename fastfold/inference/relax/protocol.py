"""Relaxation protocol: bounded rounds of minimisation until no violations remain (supplement, section 1.8.6)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastfold.errors import FastFoldError
from fastfold.inference.relax.config import RelaxConfig, check_installed
from fastfold.inference.relax.result import BondedCysteines, RelaxResult, relaxed_mmcif, relaxed_pdb
from fastfold.inference.relax.stereo import (
    Violation,
    chain_breaks,
    check_not_mirrored,
    describe_ring,
    open_breaks,
    rings_with_bonds,
    side_chains_to_rebuild,
    violating_residues,
)
from fastfold.protein.io.observed import RELAXATION, read_logged
from fastfold.protein.io.read import named_protein
from fastfold.protein.labels import AuthorNames, residue_label
from fastfold.protein.protein import Protein
from fastfold.protein.validation import check_structure
from fastfold.utils.foreign_text import first_few
from fastfold.utils.machine import available_cores
from fastfold.utils.units import clock

if TYPE_CHECKING:
    from fastfold.inference.output.prediction import Prediction
    from fastfold.inference.relax.platforms import ChosenPlatform

_MOST_NAMED = 10
_SECONDS_BETWEEN_LINES = 10.0
_USUAL_ITERATIONS = 300  #: Iterations of a round in the estimate of the remaining time


class _Ticker:
    """Progress lines of a long relaxation."""

    def __init__(self, say: Callable[[str], None], most: int) -> None:
        self._say, self._most = say, most
        self._started = self._last = time.perf_counter()

    def of_round(self, number: int) -> Callable[[int], None]:
        began = time.perf_counter()

        def on_iteration(iterations: int) -> None:
            now = time.perf_counter()
            if now - self._last < _SECONDS_BETWEEN_LINES:
                return
            self._last = now
            left = (now - began) / iterations * (_USUAL_ITERATIONS - iterations)
            estimate = f"about {clock(left)} left" if left > 0 else "longer than usual"
            if number > 1:
                estimate += " in this round"
            self._say(
                f"round {number} of at most {self._most}, {iterations:,} iterations, elapsed "
                f"{clock(now - self._started)}, {estimate}"
            )

        return on_iteration


def relax(
    structure: Any,
    config: RelaxConfig | None = None,
    *,
    names: AuthorNames | None = None,
    continuous: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> RelaxResult:
    """Relax a structure with AlphaFold's protocol.

    Missing heavy atoms and hydrogens are added, then the Amber99sb energy is minimised with springs on the heavy atoms.
    While residues are violated or the energy is positive, another round starts from the result, without springs on
    residues violated in any earlier round. Iterations and rounds have limits, unlike in AlphaFold. There is one
    attempt, because another would give the same result.

    A failed relaxation does not raise: the result has the reason, and names the residues.

    Args:
        structure: A :class:`fastfold.Protein`, a file, or another structure of
            :func:`fastfold.protein.io.observed.read_observed`. Residues without atoms are left out, and the chain ends
            next to them.
        config: Settings; AlphaFold's by default.
        names: Names of chains and residues in messages; by default those of ``structure``.
        continuous: True if residues with consecutive numbers are bonded at any distance, as in a prediction. Otherwise
            a chain ends at each break (:func:`fastfold.protein.geometry.without_bond`).
        on_progress: Called every ten seconds with the round, the iterations and the estimated remaining time.

    Returns:
        Relaxed structure with its record; chains, numbers and B-factors are those of the input.

    Raises:
        InputError: The file cannot be read, or the force field does not support the structure: a residue of unknown
            type with atoms, one with fewer than three atoms, or one alone without its backbone. Names it.
        OutputError: The structure has no atoms, or a position is not finite.
        ConfigError: The platform does not work, or OpenMM is not installed.

    Example:
        >>> import fastfold
        >>> from fastfold.inference.relax import RelaxConfig, relax
        >>> prediction = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0)
        >>> result = relax(prediction.protein, RelaxConfig(platform="CPU"))
        >>> result.energy_after < result.energy_before
        True
    """
    started = time.perf_counter()
    config = config or RelaxConfig()
    check_installed()
    from fastfold.inference.relax.platforms import choose_platform
    from fastfold.inference.relax.prepare import alone, check_relaxable

    if not isinstance(getattr(structure, "protein", structure), Protein):
        structure = read_logged(structure, RELAXATION, whole=True)
    source, own_names = named_protein(structure)
    names = names or own_names
    protein = source if continuous else open_breaks(source)
    breaks = {} if continuous else chain_breaks(protein, names)
    check_relaxable(protein, names)
    check_not_mirrored(protein, names)
    platform = choose_platform(config.platform, threads=config.threads or available_cores())
    before = violating_residues(protein, names)
    start = RelaxResult(
        protein=protein,
        platform=platform.label,
        violations_before=before,
        violations=before,
        chain_breaks=tuple(breaks.values()),
        capped=tuple(residue_label(protein, i, names) for i in alone(protein)),
    )
    done = _rounds(start, config, platform, names, _Ticker(on_progress, config.max_rounds))
    return replace(
        done,
        protein=replace(done.protein, residue_index=source.residue_index),
        reason=done.reason or _reason(done),
        geometry_before=check_structure(protein).figures,
        geometry=check_structure(done.protein).figures if done.minimized else None,
        seconds=time.perf_counter() - started,
    )


def _rounds(
    done: RelaxResult, config: RelaxConfig, platform: ChosenPlatform, names: AuthorNames, ticker: _Ticker
) -> RelaxResult:
    """Minimise until the energy is negative and no violation remains, a round fails, or the rounds are used up.

    A side chain with a pierced ring, or with the bond through it, is placed again before the next round.
    """
    from openmm import OpenMMException

    from fastfold.inference.relax.minimize import minimize
    from fastfold.inference.relax.prepare import prepare, to_protein

    protein, prepared, freed = done.protein, None, set[int]()
    rebuild = side_chains_to_rebuild(rings_with_bonds(protein), protein)
    for number in range(1, config.max_rounds + 1):
        if done.rounds:
            freed |= {v.index for v in done.violations if _is_mended_by_freedom(v)}
        try:
            prepared = prepared or prepare(protein, names, rebuild=rebuild)
            tick = ticker.of_round(number)
            minimum = minimize(prepared, config, platform, free_residues=freed, on_iteration=tick)
            if not (np.isfinite(minimum.positions).all() and math.isfinite(minimum.energy_after)):
                raise ValueError("the energy of the result is not finite")
        except FastFoldError:
            raise
        except (OpenMMException, ValueError, ArithmeticError, LookupError) as error:
            violations = done.violations or done.violations_before
            left = f"; violations{_named(violations)}" if violations else ""
            return replace(done, reason=f"round {number} failed ({_first_line(error)}){left}")
        prepared = replace(prepared, positions=minimum.positions)
        relaxed, hydrogens = to_protein(prepared, prepared.positions, protein)
        pierced = rings_with_bonds(relaxed)
        done = replace(
            done,
            protein=relaxed,
            hydrogens=hydrogens,
            energy_before=minimum.energy_before if done.energy_before is None else done.energy_before,
            energy_after=minimum.energy_after,
            restraint_energy=minimum.restraint_energy,
            heavy_atom_rmsd=_heavy_atom_rmsd(protein, relaxed),
            violations=violating_residues(relaxed, names),
            rounds=number,
            iterations=done.iterations + minimum.iterations,
            iteration_limit_reached=minimum.limit_reached,
            residues_freed=len(freed),
            atoms_added=prepared.atoms_added,
            disulfides=tuple(
                BondedCysteines((i, j), (residue_label(protein, i, names), residue_label(protein, j, names)))
                for i, j in prepared.disulfides
            ),
            side_chains_rebuilt=tuple(residue_label(protein, i, names) for i in sorted(rebuild)),
            pierced_rings=tuple(describe_ring(ring, protein, names) for ring in pierced),
        )
        if more := side_chains_to_rebuild(pierced, protein) - rebuild:
            rebuild |= more
            prepared = None
        elif not _is_worth_a_round(done):
            break
    return done


def _is_worth_a_round(done: RelaxResult) -> bool:
    if done.violations:
        return any(map(_is_mended_by_freedom, done.violations))
    return done.energy_after is None or not done.energy_after < 0.0


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split("  ")[0].rstrip(".")  # without OpenMM's link to a web page


def _is_mended_by_freedom(violation: Violation) -> bool:
    """Return True if another round without springs may help; handedness never changes."""
    return set(violation.kinds) != {"chirality"}


def _reason(done: RelaxResult) -> str:
    reasons, energy = [], math.nan if done.energy_after is None else done.energy_after
    if not energy < 0.0:
        reasons.append(f"the energy stays positive at {energy:,.0f} kJ/mol")
    if done.violations:
        reasons.append(f"violations remain{_named(done.violations)}")
    if done.pierced_rings:
        reasons.append(f"bonds pass through rings: {', '.join(done.pierced_rings)}")
    return "; ".join(reasons)


def _named(violations: Sequence[Violation]) -> str:
    named = [f"{v.residue} ({', '.join(v.kinds)})" for v in violations]
    return f" at {first_few(named, _MOST_NAMED)}"


def _heavy_atom_rmsd(before: Protein, after: Protein) -> float:
    both = (before.atom_mask > 0.5) & (after.atom_mask > 0.5)
    moved = before.atom_positions[both].astype(np.float64) - after.atom_positions[both]
    return float(np.sqrt(np.square(moved).sum(-1).mean()))


@dataclass(frozen=True, eq=False)
class RelaxedPrediction:
    """Prediction of the network, with its confidences, and the result of its relaxation.

    Example:
        >>> import fastfold
        >>> relaxed = fastfold.relax_prediction(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0))
        >>> relaxed.prediction.name, len(relaxed.result.protein)
        ('query', 10)
    """

    prediction: Prediction
    result: RelaxResult

    @property
    def protein(self) -> Protein:
        """Relaxed structure without hydrogens."""
        return self.result.protein

    @property
    def author_names(self) -> AuthorNames:
        """Names of chains and residues in files."""
        return self.prediction.author_names

    def record(self) -> dict[str, Any]:
        """Return energies, movement, violations and seconds for the scores file, in JSON's types."""
        return self.result.to_dict()

    def to_pdb(self) -> str:
        """Format the relaxed structure with hydrogens as a PDB file, with pLDDT in the B-factor column.

        Raises:
            OutputError: The minimiser failed (``result.minimized`` is false).
            PdbLimitError: The structure exceeds the PDB format; use :meth:`to_mmcif`.
        """
        return relaxed_pdb(self.result, title=self.prediction.title, names=self.prediction.names)

    def to_mmcif(self) -> str:
        """Format the relaxed structure as ModelCIF, with the prediction's confidences; errors as :meth:`to_pdb`."""
        prediction = self.prediction
        return relaxed_mmcif(self.result, names=prediction.names, **prediction.modelcif_arguments())


def relax_prediction(prediction: Prediction, config: RelaxConfig | None = None) -> RelaxedPrediction:
    """Relax the structure of a prediction; settings and errors are those of :func:`relax`.

    Example:
        >>> import fastfold
        >>> from fastfold.inference.relax import relax_prediction
        >>> prediction = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0)
        >>> relaxed = relax_prediction(prediction)
        >>> relaxed.result.heavy_atom_rmsd < 5
        True
    """
    return RelaxedPrediction(prediction, relax(prediction, config, continuous=True))
