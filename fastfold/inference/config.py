"""``InferConfig``: the settings of a fold, the same for the command line and for Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastfold.errors import ConfigError
from fastfold.utils.units import parse_bytes

if TYPE_CHECKING:
    from fastfold.evoformer.precision import Precision

_RECORDED = ("num_recycles", "seed", "precision", "plots", "pae")
"""Settings on which the files of a target depend; the others decide where and in which pieces it is folded."""


@dataclass(frozen=True)
class InferConfig:
    """How targets are folded.

    Attributes:
        num_recycles: Extra passes; None for each network's own number.
        seed: Seed of everything random: the same seed gives the same prediction.
        precision: ``fp32``, or ``bf16`` for a trunk in bfloat16.
        plots: Whether plots are drawn.
        pae: Whether aligned errors of all pairs are kept and written; None for short targets only
            (:func:`~fastfold.inference.folding.keeps_pae`).
        device: ``auto`` (CUDA where there is one), ``cpu`` or ``cuda``.
        parallel: ``dap=<number>``: as many processes fold each target together
            (:mod:`fastfold.inference.distributed`); None for one process.
        memory_budget: Memory that a fold may take, ``24GiB`` or a number of bytes for example; None for what the
            device has free. The sizes of all blocks follow from it.

    Raises:
        ConfigError: A number makes no sense.
    """

    num_recycles: int | None = None
    seed: int = 0
    precision: Precision = "fp32"
    plots: bool = True
    pae: bool | None = None
    device: str = "auto"
    parallel: str | None = None
    memory_budget: str | int | None = None

    def __post_init__(self) -> None:
        if self.num_recycles is not None and self.num_recycles < 0:
            raise ConfigError(f"num_recycles must not be negative, got {self.num_recycles}")
        if self.memory_budget is not None:
            object.__setattr__(self, "memory_budget", parse_bytes(self.memory_budget))

    @property
    def budget(self) -> int | None:
        """``memory_budget`` in bytes."""
        return None if self.memory_budget is None else int(self.memory_budget)

    def recorded(self) -> dict[str, Any]:
        """The settings on which the files of a target depend, by name."""
        return {name: getattr(self, name) for name in _RECORDED}

    def recycles(self, network: Any) -> int:
        """Extra passes of a network.

        Args:
            network: Official configuration tree.
        """
        own: int = network.model.num_recycle
        return own if self.num_recycles is None else self.num_recycles
