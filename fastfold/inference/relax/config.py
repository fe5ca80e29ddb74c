"""``RelaxConfig``: the settings of a relaxation, for the command line and for Python."""

from __future__ import annotations

from dataclasses import dataclass

from fastfold.utils.option_fields import LARGEST, check_number, check_options, option
from fastfold.utils.packages import require_package

PLATFORMS = ("CUDA", "HIP", "OpenCL", "CPU", "Reference")  #: OpenMM's platforms, fastest first
PLATFORM_CHOICES = ("auto", *PLATFORMS)


@dataclass(frozen=True)
class RelaxConfig:
    """Settings of a relaxation.

    Raises:
        ConfigError: A setting is invalid; names it.

    Example:
        >>> from fastfold.inference.relax import RelaxConfig
        >>> RelaxConfig(platform="CPU", max_rounds=1).max_iterations
        2000
    """

    #: One of :data:`PLATFORMS`, or ``auto`` for the fastest that works
    platform: str = option(
        default="auto",
        choices=PLATFORM_CHOICES,
        help="OpenMM's platform (default: the fastest that works here)",
    )
    #: Threads of the CPU platform; None for all cores. Results are reproducible only with one thread.
    threads: int | None = option(
        default=None,
        bounds=(1, LARGEST),
        help="threads on the CPU; with one the result is the same each time (default: all cores)",
    )
    #: Largest number of iterations in one attempt of the minimiser. A round is one minimisation, in which OpenMM makes
    #: several attempts, usually five, to satisfy the constraints on bonds to hydrogens.
    max_iterations: int = option(
        default=2000,
        bounds=(1, LARGEST),
        help="maximum iterations of an attempt of the minimiser; a round has about five attempts (default 2,000)",
    )
    #: Largest number of rounds; each round after the first frees the residues with violations
    max_rounds: int = option(
        default=3,
        bounds=(1, LARGEST),
        help="maximum rounds; each after the first frees the residues with violations from their springs (default 3)",
    )
    stiffness: float = 10.0  #: Force constant of the restraints on heavy atoms, in kcal/mol/Å²
    #: The minimiser stops when the root mean square of all force components is below this, in kcal/mol/nm
    tolerance: float = 2.39

    def __post_init__(self) -> None:
        check_options(self)
        check_number("stiffness", self.stiffness, 0.0, 1e6)
        check_number("tolerance", self.tolerance, 1e-6, 1e6)


def check_installed() -> None:
    """Raise ConfigError if OpenMM or pdbfixer is not installed."""
    for package in ("openmm", "pdbfixer"):
        require_package(package, "relaxation")
