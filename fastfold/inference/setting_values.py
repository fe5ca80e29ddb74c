"""Values of a fold's settings: parse them from text, and check them."""

from __future__ import annotations

import numbers
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fastfold.errors import ConfigError
from fastfold.utils.option_fields import check_whole

SEED_LIMIT = 2**31  #: Upper limit of seeds, exclusive
BatchSize = int | Literal["auto"]
"""Largest number of targets in a pass; ``auto`` batches only lengths at which it is faster."""
MAX_BATCH = 256  #: Largest number of targets in a pass that can be requested


def check_batch(batch: Any) -> BatchSize:
    """Return ``auto`` or a batch size up to :data:`MAX_BATCH` from a number or text, or raise ConfigError."""
    if batch == "auto":
        return "auto"
    try:
        number = int(str(batch))
    except ValueError:
        number = 0
    if isinstance(batch, bool) or not 1 <= number <= MAX_BATCH:
        raise ConfigError(f"batch: expected auto or a number from 1 to {MAX_BATCH}, found {batch!r}")
    return number


def structure_path(text: str) -> Path:
    """Return the path of a structure, which in Python may be an object instead."""
    return Path(text)


def parse_device(text: str) -> str:
    """Return the name of a device, or raise ConfigError."""
    if re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", text, re.ASCII) is None:
        raise ConfigError(f"{text[:20]!r} is not a device: auto, cpu, cuda, cuda:1, mps")
    return text


def check_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return seeds from 0 to 2³¹ - 1 as a tuple without repetitions, in the given order, or raise ConfigError."""
    if not isinstance(seeds, (numbers.Number, Sequence)) or isinstance(seeds, str):
        raise ConfigError(f"seeds must be a whole number or a list of them, found {seeds!r}")
    listed = [seeds] if isinstance(seeds, numbers.Number) else list(seeds)
    if not listed:
        raise ConfigError("seeds is empty; give at least one seed")
    for seed in listed:
        check_whole("seed", seed, 0, SEED_LIMIT - 1)
    return tuple(dict.fromkeys(int(seed) for seed in listed))  # type: ignore[arg-type]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds written as ``0``, ``0-4`` or ``1,3,10-12``; a ConfigError names the wrong part."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,10})(?:-(\d{1,10}))?\s*", part, re.ASCII)
        if match is None:
            raise ConfigError(
                f"seeds {text[:40]!r}: {part[:20]!r} is not a seed; write for example 0-4 or 1,3,7"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < SEED_LIMIT or last - first >= 100_000:
            raise ConfigError(
                f"seeds {text[:40]!r}: {part[:24]!r} is not a range of at most 100,000 seeds below 2³¹"
            )
        seeds += range(first, last + 1)
    return check_seeds(seeds)


def parse_max_msa(text: str) -> tuple[int, int]:
    """Parse numbers of rows, clusters and extra MSA, written as ``512:1024``, or raise ConfigError."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text.strip(), re.ASCII)
    if match is None:
        raise ConfigError(f"`InferConfig.max_msa`: {text[:40]!r}: write CLUSTERS:EXTRA, for example 512:1024")
    return check_max_msa((int(match[1]), int(match[2])))


def check_max_msa(value: Any) -> tuple[int, int]:
    """Return numbers of rows, each up to 100,000, from two numbers or text, or raise ConfigError."""
    if isinstance(value, str):
        return parse_max_msa(value)
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(
            f"`InferConfig.max_msa` must be two numbers of rows, clusters and extra, found {value!r}"
        )
    for number in value:
        check_whole("`InferConfig.max_msa`", number, 1, 100_000)
    return int(value[0]), int(value[1])


def parse_parallel(text: str | None) -> int:
    """Parse the number of processes written as ``dap=4`` (None is one), or raise ConfigError."""
    name, _, number = str(text or "dap=1").partition("=")
    if name != "dap" or not number.isascii() or not number.isdigit():
        raise ConfigError(
            f"`parallel={text}`: a fold supports only dynamic axial parallelism; give `parallel=dap=4` for four "
            "processes"
        )
    return int(number)
