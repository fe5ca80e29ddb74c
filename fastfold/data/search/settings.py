"""Settings of HMMER's programs, those with which AlphaFold calls jackhmmer unless something else is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastfold.errors import ConfigError

AlignmentFormat = Literal["sto", "a3m"]

MAX_E_VALUE = 1e6


@dataclass(frozen=True)
class HmmerSettings:
    """What decides the result of a search, and the form it is written in.

    Attributes:
        engine: ``jackhmmer``, or ``phmmer``: one pass, domains included by E-value 0.01 as in the program of that name.
        iterations: Passes through the database at most (``jackhmmer -N``); each after the first searches with the
            profile of what the one before included.
        e_value: Hits with a larger E-value are not reported (``-E``).
        include_e_value: Hits with a larger E-value are not included: not aligned, and not part of the next profile
            (``--incE``).
        msv_filter: Share of unrelated sequences that passes HMMER's first filter (``--F1``).
        viterbi_filter: The same of the second filter (``--F2``).
        forward_filter: The same of the third filter (``--F3``).
        file_format: ``sto`` or ``a3m``.
    """

    engine: Literal["jackhmmer", "phmmer"] = "jackhmmer"
    iterations: int = 1
    e_value: float = 1e-4
    include_e_value: float = 1e-4
    msv_filter: float = 5e-4
    viterbi_filter: float = 5e-5
    forward_filter: float = 5e-7
    file_format: AlignmentFormat = "sto"

    def __post_init__(self) -> None:
        if self.engine not in ("jackhmmer", "phmmer"):
            raise ConfigError(f"{self.engine!r} is not an engine: jackhmmer, phmmer")
        if self.iterations < 1:
            raise ConfigError(f"a search has at least one iteration, got {self.iterations}")
        if self.engine == "phmmer" and self.iterations > 1:
            raise ConfigError("phmmer goes through a database once; use jackhmmer for more iterations")
        if self.file_format not in get_args(AlignmentFormat):
            raise ConfigError(f"{self.file_format!r} is not a format of alignments: sto, a3m")
        for name, value in (("-E", self.e_value), ("--incE", self.include_e_value)):
            if not 0 < value <= MAX_E_VALUE:
                raise ConfigError(f"{name} has to be more than 0 and at most {MAX_E_VALUE:g}, got {value:g}")
        for share in (self.msv_filter, self.viterbi_filter, self.forward_filter):
            if not 0 < share <= 1:
                raise ConfigError(f"a filter lets a share between 0 and 1 pass, got {share:g}")

    @property
    def pipeline(self) -> dict[str, Any]:
        """The settings by the names that HMMER's pipeline has for them."""
        return {
            "E": self.e_value,
            "incE": self.include_e_value,
            "incdomE": 1e-3 if self.engine == "jackhmmer" else 1e-2,
            "F1": self.msv_filter,
            "F2": self.viterbi_filter,
            "F3": self.forward_filter,
        }
