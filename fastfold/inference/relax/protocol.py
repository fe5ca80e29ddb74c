"""Relaxation protocol: bounded rounds of minimisation until no violations remain (supplement, section 1.8.6)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastfold.errors import FastFoldError
from fastfold.inference.relax.chain_breaks import chain_breaks, open_breaks
from fastfold.inference.relax.config import RelaxConfig, check_installed
from fastfold.inference.relax.result import RelaxResult
from fastfold.inference.relax.stereo import check_not_mirrored
from fastfold.inference.relax.violations import Violation, violating_residues
from fastfold.protein.io.read import named_protein
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Hydrogens, Protein
from fastfold.utils.machine import available_cores
from fastfold.utils.units import clock

if TYPE_CHECKING:
    from fastfold.inference.relax.platforms import ChosenPlatform

_MOST_NAMED = 10
_SECONDS_BETWEEN_LINES = 10.0
_USUAL_ITERATIONS = 300  #: Iterations of a round in the estimate of the remaining time


class _Ticker:
    """Progress lines of a long relaxation."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._started = self._last = time.perf_counter()

    def of_round(self, number: int, most: int) -> Callable[[int], None]:
        """Return a callback for the iterations of a round."""
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
                f"round {number} of at most {most}, {iterations:,} iterations, elapsed "
                f"{clock(now - self._started)}, {estimate}"
            )

        return on_iteration


@dataclass
class _Progress:
    protein: Protein
    hydrogens: Hydrogens | None = None
    violations: tuple[Violation, ...] = ()
    energies: list[tuple[float, float, float]] = field(default_factory=list)
    iterations: int = 0
    limit_reached: bool = False
    freed: set[int] = field(default_factory=set)
    atoms_added: int = 0
    failure: str = ""


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
    While residues are violated, another round starts, without springs on residues violated in any earlier round.
    Iterations and rounds have limits, unlike in AlphaFold. There is one attempt, because another would give the same
    result.

    A failed relaxation does not raise: the result has the reason, and names the residues.

    Args:
        structure: A :class:`fastfold.Protein`, a file, or another structure of
            :func:`fastfold.protein.io.read.read_structure`. Residues without atoms are left out, and the chain ends
            next to them.
        config: Settings; AlphaFold's by default.
        names: Names of chains and residues in messages; by default those of ``structure``.
        continuous: True if residues with consecutive numbers are bonded at any distance, as in a prediction. Otherwise
            a chain ends where C and N are more than 2.5 Å apart.
        on_progress: Called every ten seconds with the round, the iterations and the estimated remaining time.

    Returns:
        Relaxed structure with its record; chains, numbers and B-factors are those of the input.

    Raises:
        InputError: The force field does not support the structure: a chain of one residue, a residue of unknown type
            with atoms, or one with fewer than three atoms. Names it.
        OutputError: The structure has no atoms, or a position is not finite.
        ConfigError: The platform does not work, or OpenMM is not installed.
    """
    started = time.perf_counter()
    config = config or RelaxConfig()
    check_installed()
    from fastfold.inference.relax.platforms import choose_platform
    from fastfold.inference.relax.prepare import check_relaxable

    protein, own_names = named_protein(structure)
    names = names or own_names
    breaks = {} if continuous else chain_breaks(protein, names)
    given, protein = protein, open_breaks(protein, breaks)
    check_relaxable(protein, names, breaks)
    check_not_mirrored(protein, names)
    platform = choose_platform(config.platform, threads=config.threads or available_cores())
    before = violating_residues(protein, names)
    done = _rounds(protein, config, platform, names, _Ticker(on_progress))
    violations = done.violations if done.energies else before
    first, last = (done.energies[0], done.energies[-1]) if done.energies else (None, None)
    return RelaxResult(
        protein=replace(done.protein, residue_index=given.residue_index),
        hydrogens=done.hydrogens,
        reason=done.failure or _reason(last[1] if last else math.nan, violations),
        platform=platform.label,
        energy_before=first[0] if first else None,
        energy_after=last[1] if last else None,
        restraint_energy=last[2] if last else None,
        heavy_atom_rmsd=_heavy_atom_rmsd(protein, done.protein) if done.energies else None,
        violations_before=before,
        violations=violations,
        rounds=len(done.energies),
        iterations=done.iterations,
        iteration_limit_reached=done.limit_reached,
        residues_freed=len(done.freed),
        atoms_added=done.atoms_added,
        seconds=time.perf_counter() - started,
        chain_breaks=tuple(breaks.values()),
    )


def _rounds(
    protein: Protein,
    config: RelaxConfig,
    platform: ChosenPlatform,
    names: AuthorNames,
    ticker: _Ticker,
) -> _Progress:
    """Minimise until no violation remains, a round fails, or the limit of rounds is reached."""
    from openmm import OpenMMException

    from fastfold.inference.relax.minimize import minimize
    from fastfold.inference.relax.prepare import prepare, to_protein

    done, prepared = _Progress(protein), None
    for number in range(config.max_rounds):
        freed = done.freed | {v.index for v in done.violations if _is_mended_by_freedom(v)}
        try:
            prepared = prepared or prepare(protein, names)
            tick = ticker.of_round(number + 1, config.max_rounds)
            found = minimize(prepared, config, platform, free_residues=freed, on_iteration=tick)
            if not (np.isfinite(found.positions).all() and math.isfinite(found.energy_after)):
                raise ValueError("the energy of the result is not finite")
        except FastFoldError:
            raise
        except (OpenMMException, ValueError, ArithmeticError, LookupError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            what = lines[0].split("  ")[0].rstrip(".")  # without OpenMM's link to a web page
            done.failure = f"round {number + 1} failed ({what})"
            break
        prepared = replace(prepared, positions=found.positions)
        done.protein, done.hydrogens = to_protein(prepared, prepared.positions, protein)
        done.energies.append((found.energy_before, found.energy_after, found.restraint_energy))
        done.iterations += found.iterations
        done.limit_reached = found.limit_reached
        done.freed = freed
        done.atoms_added = prepared.atoms_added
        done.violations = violating_residues(done.protein, names)
        if not any(map(_is_mended_by_freedom, done.violations)):
            break
    if done.failure and (bad := done.violations or violating_residues(protein, names)):
        done.failure += f"; violations{_named(bad)}"
    return done


def _is_mended_by_freedom(violation: Violation) -> bool:
    """Return True if another round without springs may help; handedness never changes."""
    return set(violation.kinds) != {"chirality"}


def _reason(energy: float, violations: Sequence[Violation]) -> str:
    """Return the reason why a structure is not relaxed; empty if it is."""
    reasons = []
    if not energy < 0.0:
        reasons.append(f"the energy stays positive at {energy:,.0f} kJ/mol")
    if violations:
        reasons.append(f"violations remain{_named(violations)}")
    return "; ".join(reasons)


def _named(violations: Sequence[Violation]) -> str:
    named = [f"{v.residue} ({', '.join(v.kinds)})" for v in violations[:_MOST_NAMED]]
    more = f" and {len(violations) - _MOST_NAMED} more" if len(violations) > _MOST_NAMED else ""
    return f" at {', '.join(named)}{more}"


def _heavy_atom_rmsd(before: Protein, after: Protein) -> float:
    """Compute the root mean square distance in Å of the heavy atoms present in both."""
    both = (before.atom_mask > 0.5) & (after.atom_mask > 0.5)
    moved = before.atom_positions[both].astype(np.float64) - after.atom_positions[both]
    return float(np.sqrt(np.square(moved).sum(-1).mean()))
