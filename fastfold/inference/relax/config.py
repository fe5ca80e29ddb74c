"""``RelaxConfig``: the settings of a relaxation, for the command line and for Python."""

from __future__ import annotations

from dataclasses import dataclass

from fastfold.errors import ConfigError
from fastfold.utils.packages import require_package

PLATFORMS = ("CUDA", "HIP", "OpenCL", "CPU", "Reference")  #: OpenMM's platforms, fastest first


@dataclass(frozen=True)
class RelaxConfig:
    """Settings of a relaxation.

    Raises:
        ConfigError: A setting is invalid; names it.
    """

    platform: str = "auto"  #: One of :data:`PLATFORMS`, or ``auto`` for the fastest that works
    #: Threads of the CPU platform; None for all cores. Results are reproducible only with one thread.
    threads: int | None = None
    #: Largest number of iterations in one attempt of the minimiser. A round is one minimisation, in which OpenMM makes
    #: several attempts, usually five, to satisfy the constraints on bonds to hydrogens.
    max_iterations: int = 2000
    #: Largest number of rounds; each round after the first frees the residues with violations
    max_rounds: int = 3
    stiffness: float = 10.0  #: Force constant of the restraints on heavy atoms, in kcal/mol/Å²
    #: The minimiser stops when the root mean square of all force components is below this, in kcal/mol/nm
    tolerance: float = 2.39

    def __post_init__(self) -> None:
        if self.platform not in ("auto", *PLATFORMS):
            raise ConfigError(
                f"unknown relaxation platform {self.platform!r}; use auto, {', '.join(PLATFORMS)}"
            )
        for name in ("threads", "max_iterations", "max_rounds"):
            value = getattr(self, name)
            if name == "threads" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise ConfigError(f"{name} of a relaxation must be a whole number from 1, found {value!r}")
        for name, least in (("stiffness", 0.0), ("tolerance", 1e-6)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= 1e6:
                raise ConfigError(
                    f"{name} of a relaxation must be a number from {least:g} to 1e6, found {value!r}"
                )


def check_installed() -> None:
    """Raise ConfigError if OpenMM or pdbfixer is not installed."""
    for package in ("openmm", "pdbfixer"):
        require_package(package, "relaxation")
