"""Rates that were measured on a GPU, from a JSON file or from the table of the kernels' benchmark."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError

LINKS = ("bandwidth", "link", "network")
"""Rates in bytes/s."""

_DTYPES = ("bfloat16", "float32")


def read_measured(path: Path, gpu: str) -> dict[str, Any]:
    """Measured rates of a GPU.

    Args:
        path: Either a JSON object with ``gpu`` (the name) and any of ``matrix_rates`` (FLOP/s achieved in the
            operators, by dtype), ``bandwidth``, ``link`` and ``network`` (bytes/s achieved). Or what
            ``benchmarks/kernels.py`` writes, ``kernels_<gpu>_<dtype>.csv``: then our operators' median rates count,
            of products for those that come nearer to the matrix product's ceiling, of bytes for the others.
        gpu: The name that is expected.

    Returns:
        Those of ``matrix_rates``, ``bandwidth``, ``link`` and ``network`` that there are.

    Raises:
        ConfigError: The file cannot be read, is of another GPU, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: measured rates cannot be read: {error}") from None
    found = _of_kernels(path, text, gpu) if path.suffix == ".csv" else _of_json(path, text, gpu)
    table = found.get("matrix_rates", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: matrix_rates is an object of FLOP/s by dtype")
    if set(table) - set(_DTYPES):
        raise ConfigError(f"{path}: matrix_rates has {', '.join(table)}; known are {' and '.join(_DTYPES)}")
    for number in (*(found[key] for key in LINKS if key in found), *table.values()):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ConfigError(f"{path}: {number!r} is no rate; rates are numbers above 0")
    return found


def _of_json(path: Path, text: str, gpu: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: measured rates cannot be read: {error}") from None
    known = {"gpu", "matrix_rates", *LINKS}
    if not isinstance(found, dict) or set(found) - known:
        raise ConfigError(f"{path}: measured rates are a JSON object with {', '.join(sorted(known))}")
    if found.pop("gpu", None) != gpu:
        raise ConfigError(f'{path}: these are not the rates of {gpu!r}; it has to say "gpu": "{gpu}"')
    return found


def _of_kernels(path: Path, text: str, gpu: str) -> dict[str, Any]:
    words = path.stem.lower().split("_")
    dtype = next((dtype for dtype in _DTYPES if dtype in words), None)
    if gpu.partition("-")[0] not in words or dtype is None:
        raise ConfigError(
            f"{path}: not a table of {gpu!r}, which is called kernels_..._{gpu}_..._<dtype>.csv"
        )
    products, copies = [], []
    for line, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        if row.get("implementation") != "fastfold":
            continue
        try:
            rate, of_product = float(row["tflops"]), float(row["of_product"])
            copied, of_copy = float(row["gbs"]), float(row["of_copy"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}:{line}: not a line of the kernels' benchmark") from None
        # What was not measured is no number.
        if of_product >= of_copy:
            products.append(rate * 1e12)
        elif of_copy > of_product:
            copies.append(copied * 1e9)
    if not products:
        raise ConfigError(f"{path}: no operator of ours was measured")
    found: dict[str, Any] = {"matrix_rates": {dtype: statistics.median(products)}}
    return found | ({"bandwidth": statistics.median(copies)} if copies else {})
