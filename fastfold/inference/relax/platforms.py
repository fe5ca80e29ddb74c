"""Choose one of OpenMM's platforms that works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import openmm

from fastfold.errors import ConfigError, first_line
from fastfold.inference.relax.config import PLATFORMS

_EXTRAS = {"CUDA": "cuda12 or cuda13", "HIP": "hip"}  #: Extras of this package that install a platform


@dataclass(frozen=True)
class ChosenPlatform:
    """Working platform of OpenMM, its settings, and its name in records."""

    platform: Any
    properties: dict[str, str]
    label: str


def choose_platform(name: str = "auto", *, threads: int = 1) -> ChosenPlatform:
    """Return a working platform by its name, the fastest for ``auto``, or raise ConfigError."""
    problems = []
    for candidate in PLATFORMS if name == "auto" else (name,):
        try:
            platform = openmm.Platform.getPlatformByName(candidate)
            properties = {} if candidate == "Reference" else {"DeterministicForces": "true"}
            if candidate == "CPU":
                properties["Threads"] = str(threads)
            _try(platform, properties)
        except openmm.OpenMMException as error:
            problems.append(f"{candidate}: {first_line(error)}")
            continue
        label = candidate
        if candidate == "CPU":
            label += f" ({threads} thread{'s' if threads > 1 else ''})"
        return ChosenPlatform(platform, properties, label)
    here = [openmm.Platform.getPlatform(i).getName() for i in range(openmm.Platform.getNumPlatforms())]
    extra = f"; the extra {_EXTRAS[name]} of fastfold installs it" if name in _EXTRAS else ""
    raise ConfigError(
        f"the relaxation platform {name} cannot be used here ({'; '.join(problems)}); this installation of OpenMM has "
        f"{', '.join(here)}{extra}"
    )


def _try(platform: Any, properties: dict[str, str]) -> None:
    """Compute one energy, because an installed platform may lack a device or driver."""
    system = openmm.System()
    system.addParticle(1.0)
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform, properties)
    context.setPositions([openmm.Vec3(0.0, 0.0, 0.0)])
    context.getState(energy=True)
