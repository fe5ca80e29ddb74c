"""Settings of HMMER's programs; the defaults are AlphaFold's for jackhmmer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastfold.errors import ConfigError

AlignmentFormat = Literal["sto", "a3m"]

MAX_E_VALUE = 1e6


@dataclass(frozen=True)
class HmmerSettings:
    """Settings that determine the result of a search, and its format.

    Attributes:
        engine: ``jackhmmer``, or ``phmmer``: one pass, with domains up to E-value 0.01 as in the program of that name.
        iterations: Largest number of passes through the database (``jackhmmer -N``); each after the first uses the
            profile of the hits included before.
        e_value: Largest E-value of reported hits (``-E``).
        include_e_value: Largest E-value of included hits, which are aligned and used for the next profile (``--incE``).
        msv_filter: Share of unrelated sequences that passes HMMER's first filter (``--F1``).
        viterbi_filter: Share that passes the second filter (``--F2``).
        forward_filter: Share that passes the third filter (``--F3``).
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
            raise ConfigError(f"engine must be jackhmmer or phmmer, found {self.engine!r}")
        if self.iterations < 1:
            raise ConfigError(f"a search needs at least one iteration, found {self.iterations}")
        if self.engine == "phmmer" and self.iterations > 1:
            raise ConfigError("phmmer makes one pass through a database; use jackhmmer for more iterations")
        if self.file_format not in get_args(AlignmentFormat):
            raise ConfigError(f"the format of alignments must be sto or a3m, found {self.file_format!r}")
        for name, value in (("-E", self.e_value), ("--incE", self.include_e_value)):
            if not 0 < value <= MAX_E_VALUE:
                raise ConfigError(f"{name} must be more than 0 and at most {MAX_E_VALUE:g}, found {value:g}")
        for share in (self.msv_filter, self.viterbi_filter, self.forward_filter):
            if not 0 < share <= 1:
                raise ConfigError(f"a filter must pass a share between 0 and 1, found {share:g}")

    @property
    def pipeline(self) -> dict[str, Any]:
        """Return the settings under the names of HMMER's pipeline."""
        return {
            "E": self.e_value,
            "incE": self.include_e_value,
            "incdomE": 1e-3 if self.engine == "jackhmmer" else 1e-2,
            "F1": self.msv_filter,
            "F2": self.viterbi_filter,
            "F3": self.forward_filter,
        }
