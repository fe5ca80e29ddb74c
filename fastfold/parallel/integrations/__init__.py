"""Training of parallel models by accelerate, Hugging Face's Trainer and Lightning."""

from __future__ import annotations

from fastfold.errors import ConfigError
from fastfold.parallel.plan import ParallelPlan


def check_samples(plan: ParallelPlan, library: str) -> None:
    """Refuse a plan with ranks that work on the same samples.

    The library, named in the message, gives every process different samples.

    Raises:
        ConfigError: An axis has such ranks; the message names it.
    """
    for axis in ("pp", "sp", "dap", "tp"):
        size = getattr(plan, axis)
        if size > 1:
            raise ConfigError(
                f"{library} gives every process different samples, but {axis}={size} ranks work on the same ones: use "
                "dp and zero, or a loop of your own"
            )
