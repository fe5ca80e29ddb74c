"""Settings of the samples of a target, for the command line and for Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from fastfold.errors import ConfigError
from fastfold.utils.option_fields import check_options, check_whole, option

SampleMethod = Literal["columns", "clusters", "depth", "dropout"]
"""Methods of sampling: masked columns of the alignment (AFsample2), clusters of its rows (AF_Cluster), random rows, or
dropout (AFsample)."""
DEPTHS = (16, 32, 64, 128, 256, 512, 1024, 5120)
"""Default numbers of random rows (del Alamo et al., 2022, doi:10.7554/eLife.75751)."""
SIMILARITY = 0.8  #: Default of the smallest mean TM-score at which clusters are joined


def parse_depths(text: str) -> tuple[int, ...]:
    """Parse numbers of rows joined by commas, or raise ConfigError."""
    if re.fullmatch(r"\d{1,7}(,\d{1,7})*", text, re.ASCII) is None:
        raise ConfigError(f"expected numbers of rows such as 16,64,256, found {text[:40]!r}")
    return tuple(map(int, text.split(",")))


_sampling = partial(option, group="sampling")


@dataclass(frozen=True)
class Sampling:
    """Settings of the samples of a target; ConfigError for an invalid one.

    Example:
        >>> import fastfold
        >>> dropout = fastfold.Sampling("dropout", number=2)
        >>> predictions = fastfold.predict_many({"query": "MTYKLILNGK"}, "mini", sample=dropout, num_recycles=0)
        >>> len(predictions["query"])
        2
    """

    method: SampleMethod = _sampling(
        "--sample",
        choices=get_args(SampleMethod),
        metavar="METHOD",
        help="predict samples of each target: columns (mask random alignment columns), clusters (of alignment rows, "
        "needs scikit-learn), depth (random alignment rows) or dropout; see fastfold ensemble",
    )
    #: Number of samples per network and seed. None for ten, for one of each depth, or for all clusters. Of clusters,
    #: the largest are folded.
    number: int | None = _sampling(
        "--samples",
        default=None,
        bounds=(1, 100_000),
        help="samples per network and seed (default: 10; one of each depth; all clusters)",
    )
    fraction: float = _sampling(
        "--sample-fraction",
        default=0.15,
        bounds=(0.0, 1.0),
        metavar="X",
        help="share of the columns that --sample columns masks (default 0.15)",
    )
    #: Numbers of random rows besides the query, for ``depth``. Samples use them in turn. Depths beyond the alignment's
    #: are left out.
    depths: tuple[int, ...] = _sampling(
        "--sample-depths",
        default=DEPTHS,
        parse=parse_depths,
        metavar="LIST",
        help="numbers of rows for --sample depth (default 16,32,64,128,256,512,1024,5120)",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.fraction == 0:
            raise ConfigError("the share of masked columns must be over 0 and at most 1, found 0")
        if not isinstance(self.depths, Sequence) or isinstance(self.depths, str) or not self.depths:
            raise ConfigError(f"depths must be a list of numbers of rows, found {self.depths!r}")
        for depth in self.depths:
            check_whole("`Sampling.depths`: a depth", depth, 1, 1_000_000)
        object.__setattr__(self, "depths", tuple(sorted({int(depth) for depth in self.depths})))
