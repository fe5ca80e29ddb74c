"""Report of the restraints of a prediction, in JSON's types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastfold.inference.restraints.restraint import Restraint, grouped, holding, satisfied

_LEAST_PROBABILITY = 1e-4  #: Added to both probabilities of a restraint, so that a logarithm stays finite
_DOUBTFUL = -0.2
"""Evidence below which the network's distances speak against a set, by sets of 20 in ``benchmarks/restraints.py``."""


class Confidence(NamedTuple):
    """Mean pLDDT (0 to 100) by the passes of a fit, and the steps of the fit."""

    before: float
    fitted: float
    steps: int


class LeftOut(NamedTuple):
    """Trial without a group of restraints, by their numbers.

    It contradicts the restraints of groups that hold without it, and not with it.
    """

    group: tuple[int, ...]
    contradicts: tuple[int, ...]
    distances: np.ndarray  #: Distances of all restraints in Å, ``[R]``
    plddt: float  #: Gain of mean pLDDT


@dataclass(frozen=True)
class RestraintReport:
    r"""Restraints before and after they act, for one network and seed.

    Example:
        >>> from pathlib import Path
        >>> import fastfold
        >>> _ = Path("links.csv").write_text("chain1,residue1,chain2,residue2,max\nA,2,A,10,30\n")
        >>> prediction = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0, restraints="links.csv")
        >>> prediction.restraints["satisfied"], prediction.restraints["total"]
        (1, 1)
    """

    restraints: tuple[Restraint, ...]
    before: np.ndarray  #: Distances in the structure module's fold without restraints, ``[R]`` in Å
    after: np.ndarray  #: Distances in the final structure, ``[R]`` in Å
    #: Probabilities of the limits by the distogram, and of any pair at the same separation, ``[R, 2]``
    probabilities: np.ndarray
    plddt: float  #: Mean of the final structure
    confidence: Confidence | None = None  #: None without a fit
    left_out: tuple[LeftOut, ...] | None = None  #: Trials without each group; None if there were none

    def to_json(self) -> dict[str, Any]:
        """Return the report in JSON's types, with a row for each line of a group."""
        lines: dict[Any, list[int]] = {}
        for number, one in enumerate(self.restraints):
            lines.setdefault((one.line, one.group) if one.group else number, []).append(number)
        rows = [self._row(numbers) for numbers in lines.values()]
        row_of = {
            number: row for row, numbers in zip(rows, lines.values(), strict=True) for number in numbers
        }
        for trial in self.left_out or ():
            contradicted = list(dict.fromkeys(self.restraints[i].line for i in trial.contradicts))
            for number in trial.group:
                nearest = self._nearest(trial.group, trial.distances)
                row_of[number] |= {
                    "contradicts": contradicted,
                    "plddt_gain_without": round(trial.plddt, 2),
                    "distance_without": round(float(trial.distances[nearest]), 2),
                }
        fit = self.confidence
        return {
            "satisfied_before": satisfied(self.restraints, self.before),
            "satisfied": satisfied(self.restraints, self.after),
            "satisfied_left_out": None if not self.left_out else sum(map(self._holds_without, self.left_out)),
            "total": len(grouped(self.restraints)),
            "evidence": round(self.evidence(), 3),
            "doubtful": self.evidence() < _DOUBTFUL,
            "plddt_before": None if fit is None else round(fit.before, 2),
            "plddt": round(self.plddt, 2),
            "confidence_paid": None if fit is None else round(fit.before - fit.fitted, 2),
            "steps": 0 if fit is None else fit.steps,
            "leave_one_out": self.left_out is not None,
            "restraints": rows,
        }

    def evidence(self) -> float:
        """Return the mean over groups of the logarithm of a restraint's probability over that of its separation.

        The most probable restraint of a group counts.
        """
        own, usual = (self.probabilities + _LEAST_PROBABILITY).T
        ratio = np.log(own / usual)
        return float(np.mean([ratio[group].max() for group in grouped(self.restraints)]))

    def _holds_without(self, trial: LeftOut) -> bool:
        group = list(trial.group)
        return any(holding([self.restraints[i] for i in group], trial.distances[group]))

    def _row(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return the row of restraints of one line and group, by the pair nearest to its limits."""
        before, after = (self._nearest(numbers, x) for x in (self.before, self.after))
        one = self.restraints[after]
        own, usual = self.probabilities[after]
        return {
            "line": one.line,
            "residues": [one.first + 1, one.second + 1],
            "atoms": one.atoms,
            "pairs": len(numbers),
            "min": one.low,
            "max": one.high if np.isfinite(one.high) else None,
            "weight": round(one.weight, 4),
            "group": one.group,
            "distance_before": round(float(self.before[before]), 2),
            "distance": round(float(self.after[after]), 2),
            "holds": holding([one], self.after[[after]])[0],
            "probability": round(float(own), 4),
            "usual_probability": round(float(usual), 4),
        }

    def _nearest(self, numbers: Sequence[int], distances: np.ndarray) -> int:
        def violation(number: int) -> tuple[float, float]:
            one, distance = self.restraints[number], float(distances[number])
            return max(one.low - distance, distance - one.high, 0.0), distance

        return min(numbers, key=violation)
