"""Limits of a designed chain: shares of residue types, and the net charge."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.evoformer.inputs import RESIDUES
from fastfold.protein import residue_constants as rc

CHARGES = {"D": -1.0, "E": -1.0, "K": 1.0, "R": 1.0}
"""Charge of residues at pH 7. Histidine and the ends of a chain count as neutral."""

_WEIGHT = 10.0

_SHARE = re.compile(r"([A-Z]+)\s*(<=|>=)\s*(\d*\.?\d+)", re.ASCII)


@dataclass(frozen=True)
class Share:
    """Smallest and largest share, from 0 to 1, of residue types that count together in a chain."""

    letters: str
    low: float = 0.0
    high: float = 1.0

    def __str__(self) -> str:
        """Return the limit in the form of the command line."""
        return f"{self.letters}<={self.high:g}" if self.high < 1.0 else f"{self.letters}>={self.low:g}"


@dataclass(frozen=True)
class Limits:
    """Limits of a designed chain, kept residues included; ConfigError for charges not in order or not finite."""

    shares: tuple[Share, ...] = ()  #: Limits of the composition
    #: Smallest and largest net charge at pH 7 (:data:`CHARGES`); None for any
    charge: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.charge is not None:
            low, high = self.charge
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ConfigError(
                    f"`DesignConfig.charge`: expected a smallest and a largest one, found {low:g} and {high:g}"
                )

    def losses(self, residues: Tensor) -> dict[str, Tensor]:
        """Return the distance from the limits per residue, ``composition`` and ``charge`` as far as limited.

        ``residues [L, 20]`` are shares of the residue types of a chain.
        """
        losses: dict[str, Tensor] = {}
        if self.shares:
            excess = [
                (share - one.high).relu() + (one.low - share).relu()
                for one in self.shares
                for share in [residues[:, _places(one.letters)].sum(-1).mean()]
            ]
            losses["composition"] = torch.stack(excess).sum()
        if self.charge is not None:
            charge = (residues * torch.from_numpy(_CHARGES).to(residues)).sum()
            low, high = self.charge
            losses["charge"] = ((charge - high).relu() + (low - charge).relu()) / len(residues)
        return losses

    def violation(self, counts: np.ndarray) -> np.ndarray:
        """Return how many residues and charges are outside the limits, from counts ``[*, 20]`` of residue types."""
        counts = np.asarray(counts, np.float64)
        length = counts.sum(-1)
        outside = np.zeros(counts.shape[:-1])
        for one in self.shares:
            number = counts[..., _places(one.letters)].sum(-1)
            # A share of 0.3 of 10 residues is 3, whatever its last bit.
            outside += np.maximum(number - np.floor(one.high * length + 1e-9), 0)
            outside += np.maximum(np.ceil(one.low * length - 1e-9) - number, 0)
        if self.charge is not None:
            charge = counts @ _CHARGES
            outside += np.maximum(charge - self.charge[1], 0) + np.maximum(self.charge[0] - charge, 0)
        return outside

    def mutations(self, sequence: str) -> np.ndarray:
        """Return the mutations that a chain may have, ``[20, 20]`` bool, from the first type to the second.

        All limits must hold after a mutation; if they do not hold before it, fewer must be broken than before.
        """
        counts = count_residues(sequence)
        one = np.eye(RESIDUES)
        before = self.violation(counts)
        after = self.violation(counts - one[:, None] + one[None])
        return after < before if before > 0 else after == 0

    def broken(self, sequence: str) -> list[str]:
        """Return the limits that a chain breaks, in words."""
        counts = count_residues(sequence)
        texts = [
            f"{one.letters} {counts[_places(one.letters)].sum() / len(sequence):.2f}, not {one}"
            for one in self.shares
            if Limits((one,)).violation(counts) > 0
        ]
        if self.charge is not None and Limits((), self.charge).violation(counts) > 0:
            low, high = self.charge
            texts.append(f"charge {net_charge(sequence):+.0f}, not {low:g} to {high:g}")
        return texts


_CHARGES = np.array([CHARGES.get(letter, 0.0) for letter in rc.restypes])


def net_charge(sequence: str) -> float:
    """Return the net charge of a chain at pH 7, of its side chains alone (:data:`CHARGES`)."""
    return float(count_residues(sequence) @ _CHARGES)


def count_residues(sequence: str) -> np.ndarray:
    """Return the number of each of the twenty residue types, ``[20]`` float64."""
    return np.array([sequence.count(letter) for letter in rc.restypes], np.float64)


def limit_weights(limits: Limits) -> dict[str, float]:
    """Return the default weights of the losses of limits."""
    return dict.fromkeys(limits.losses(torch.zeros(1, RESIDUES)), _WEIGHT)


def forbidden_letters(text: str) -> list[str]:
    """Return the letters of residues that are never used, such as ``CM`` or ``c,m``, sorted.

    Raises:
        ConfigError: A letter is unknown, or all residues are forbidden.
    """
    letters = sorted(set(text.upper()) - {",", " "})
    if unknown := [letter for letter in letters if letter not in rc.restype_order]:
        raise ConfigError(f"expected residues such as CM to forbid, found {unknown[0]!r}")
    if len(letters) == RESIDUES:
        raise ConfigError("all residues are forbidden; leave at least one")
    return letters


def parse_shares(text: str) -> tuple[Share, ...]:
    """Parse limits of the composition such as ``KE<=0.3,W>=0.02``, with shares from 0 to 1, or raise ConfigError."""
    shares = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        match = _SHARE.fullmatch(part)
        if match is None or not float(match[3]) <= 1 or not set(match[1]) <= set(rc.restypes):
            raise ConfigError(
                f"`DesignConfig.composition`: expected a limit such as KE<=0.3 or W>=0.02, found {part!r}"
            )
        letters = "".join(dict.fromkeys(match[1]))
        value = float(match[3])
        shares.append(Share(letters, high=value) if match[2] == "<=" else Share(letters, low=value))
    return tuple(shares)


def _places(letters: Sequence[str]) -> list[int]:
    return [rc.restype_order[letter] for letter in letters]
