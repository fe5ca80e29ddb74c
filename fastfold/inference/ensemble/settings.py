"""Settings of the samples of a target, for the command line and for Python."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastfold.errors import ConfigError

SampleMethod = Literal["columns", "clusters", "depth", "dropout"]
"""Methods of sampling: masked columns of the alignment (AFsample2), clusters of its rows (AF_Cluster), random rows, or
dropout (AFsample)."""
DEPTHS = (16, 32, 64, 128, 256, 512, 1024, 5120)
"""Default numbers of random rows (del Alamo et al., 2022, doi:10.7554/eLife.75751)."""


@dataclass(frozen=True)
class Sampling:
    """Settings of the samples of a target.

    Attributes:
        method: One of :data:`SampleMethod`.
        number: Number of samples per network and seed. None for ten, for one of each depth, or for all clusters. Of
            clusters, the largest are folded.
        fraction: Share of masked columns, for ``columns``.
        depths: Numbers of random rows besides the query, for ``depth``. Samples use them in turn. Depths beyond the
            alignment's are left out.

    Raises:
        ConfigError: A setting is invalid; names it.
    """

    method: SampleMethod
    number: int | None = None
    fraction: float = 0.15
    depths: tuple[int, ...] = DEPTHS

    def __post_init__(self) -> None:
        if self.method not in get_args(SampleMethod):
            raise ConfigError(
                f"sample must be one of {', '.join(get_args(SampleMethod))}, found {self.method!r}"
            )
        if self.number is not None and not _is_whole(self.number, 1, 100_000):
            raise ConfigError(f"samples must be a whole number from 1 to 100000, found {self.number!r}")
        is_number = isinstance(self.fraction, numbers.Real) and not isinstance(self.fraction, bool)
        if not is_number or not 0 < self.fraction <= 1:
            raise ConfigError(
                f"the share of masked columns must be over 0 and at most 1, found {self.fraction!r}"
            )
        if not isinstance(self.depths, Sequence) or isinstance(self.depths, str) or not self.depths:
            raise ConfigError(f"depths must be a list of numbers of rows, found {self.depths!r}")
        for depth in self.depths:
            if not _is_whole(depth, 1, 1_000_000):
                raise ConfigError(f"a depth must be a whole number from 1, found {depth!r}")
        object.__setattr__(self, "depths", tuple(sorted({int(depth) for depth in self.depths})))


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most
