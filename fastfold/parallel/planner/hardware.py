"""Rates of accelerators and their links: tabulated from vendors' data sheets, or measured.

The table is ``accelerators.json``, with the source of each figure.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError, suggest
from fastfold.parallel.planner.calibration import TRAINING, Assumptions

LINKS = ("bandwidth", "link", "network", "host_link")  #: Rates in bytes/s

_DTYPES = ("bfloat16", "float32")

_LANES_PER_EXPONENTIAL = 8
"""Instructions that a multiprocessor issues in the time of an exponential: 128 lanes, 16 special function units."""


def read_measured(path: Path, gpu: str) -> dict[str, Any]:
    """Read measured rates of a GPU.

    Args:
        path: Either a JSON object with ``gpu`` (the name) and any of ``matrix_rates`` (FLOP/s achieved in the
            operators, by dtype), ``bandwidth``, ``link``, ``network`` and ``host_link`` (bytes/s achieved). Or a table
            of ``benchmarks/kernels/run.py``, ``kernels_<gpu>_<dtype>.csv``. Its rates are medians over our operators:
            of products for those nearer to the matrix product's ceiling, of bytes for the others.
        gpu: The expected name.

    Returns:
        The measured ones of ``matrix_rates``, ``bandwidth``, ``link``, ``network`` and ``host_link``.

    Raises:
        ConfigError: The file cannot be read, is of another GPU, or has other contents.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read measured rates: {error}") from None
    found = _of_kernels(path, text, gpu) if path.suffix == ".csv" else _of_json(path, text, gpu)
    table = found.get("matrix_rates", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: matrix_rates: expected an object of FLOP/s by dtype")
    if set(table) - set(_DTYPES):
        raise ConfigError(f"{path}: matrix_rates: expected {' and '.join(_DTYPES)}, found {', '.join(table)}")
    for number in (*(found[key] for key in LINKS if key in found), *table.values()):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ConfigError(f"{path}: expected rates above 0, found {number!r}")
    return found


def _of_json(path: Path, text: str, gpu: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: cannot read measured rates: {error}") from None
    known = {"gpu", "matrix_rates", *LINKS}
    if not isinstance(found, dict) or set(found) - known:
        raise ConfigError(f"{path}: expected a JSON object with {', '.join(sorted(known))}")
    if found.pop("gpu", None) != gpu:
        raise ConfigError(f'{path}: expected rates of {gpu!r}; the file has to contain "gpu": "{gpu}"')
    return found


def _of_kernels(path: Path, text: str, gpu: str) -> dict[str, Any]:
    words = path.stem.lower().split("_")
    dtype = next((dtype for dtype in _DTYPES if dtype in words), None)
    if gpu.partition("-")[0] not in words or dtype is None:
        raise ConfigError(f"{path}: expected a table of {gpu!r}, named kernels_..._{gpu}_..._<dtype>.csv")
    products, copies = [], []
    for line, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        if row.get("implementation") != "fastfold":
            continue
        try:
            rate, of_product = float(row["tflops"]), float(row["of_product"])
            copied, of_copy = float(row["gbs"]), float(row["of_copy"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}:{line}: expected a line of the kernels' benchmark") from None
        # A cell without a measurement is not a number.
        if of_product >= of_copy:
            products.append(rate * 1e12)
        elif of_copy > of_product:
            copies.append(copied * 1e9)
    if not products:
        raise ConfigError(f"{path}: expected measurements of FastFold's operators, found none")
    found: dict[str, Any] = {"matrix_rates": {dtype: statistics.median(products)}}
    return found | ({"bandwidth": statistics.median(copies)} if copies else {})


@dataclass(frozen=True)
class Accelerator:
    """One GPU, its machine and its network."""

    name: str  #: Name in the table
    memory: float  #: Bytes
    #: FLOP/s of dense matrix products by dtype, ``bfloat16`` and ``float32``
    matrix_rates: Mapping[str, float]
    bandwidth: float  #: Bytes/s of its memory
    link: float  #: Bytes/s that it sends to the others in its machine
    per_machine: int  #: GPUs in one machine
    network: float  #: Bytes/s that it sends to other machines
    host_link: float  #: Bytes/s between it and the host's memory, in each direction
    exponentials: float  #: Exponentials/s of its special function units
    sources: Mapping[str, str]  #: Source of each figure, by its name in the table


def _read_table() -> dict[str, Accelerator]:
    """Read the table, in bytes and seconds; its link rates are of both directions together."""
    text = resources.files("fastfold.parallel.planner").joinpath("accelerators.json").read_text("utf-8")
    return {
        name: Accelerator(
            name,
            memory=row["memory"]["value"] * 1e9,
            matrix_rates={dtype: row[dtype]["value"] * 1e12 for dtype in _DTYPES},
            bandwidth=row["bandwidth"]["value"] * 1e9,
            link=row["link"]["value"] / 2 * 1e9,
            per_machine=row["per_machine"]["value"],
            network=row["network"]["value"] / 8 * 1e9,
            host_link=row["host_link"]["value"] / 2 * 1e9,
            exponentials=row["exponentials"]["value"] * 1e12,
            sources={key: figure["source"] for key, figure in row.items()},
        )
        for name, row in json.loads(text).items()
    }


ACCELERATORS: dict[str, Accelerator] = _read_table()  #: Data sheets by name


def accelerator(name: str) -> Accelerator:
    """Return the data sheet of a GPU.

    Raises:
        ConfigError: The table lacks the name; the message suggests the nearest.
    """
    known = name.lower().removeprefix("nvidia").strip(" -_")
    if known in ACCELERATORS:
        return ACCELERATORS[known]
    hint = suggest(known, ACCELERATORS, otherwise=f"it has {', '.join(ACCELERATORS)}")
    raise ConfigError(f"the table of GPUs lacks {name!r}; {hint}")


@dataclass(frozen=True)
class Rates:
    """Rates for the cost model."""

    matrix: Mapping[str, float]  #: Achieved FLOP/s by dtype
    bandwidth: float  #: Achieved bytes/s of the memory
    link: float  #: Achieved bytes/s within a machine
    network: float  #: Achieved bytes/s between machines
    host_link: float  #: Achieved bytes/s between a GPU and the host's memory, in each direction
    sheet: Accelerator  #: The accelerator
    assumptions: Assumptions  #: Constants that data sheets lack
    origin: Mapping[str, str]  #: Source of each number, by its name in the sheet

    @property
    def scores(self) -> float:
        """Scores/s of a softmax, by the slower of its exponentials and all of its instructions."""
        return self.sheet.exponentials / max(
            1.0, self.assumptions.score_instructions / _LANES_PER_EXPONENTIAL
        )

    @property
    def calibrated(self) -> bool:
        """True if all rates were measured."""
        return all(origin.startswith("measured") for origin in self.origin.values())

    @property
    def calibration(self) -> str:
        """Calibration of times that use these rates, in a few words."""
        if self.calibrated:
            return "measured rates"
        some = any(origin.startswith("measured") for origin in self.origin.values())
        return f"uncalibrated: {'not all rates were' if some else 'no rate was'} measured on this GPU"

    @property
    def usable_memory(self) -> float:
        """Bytes that a plan may fill."""
        return self.sheet.memory * self.assumptions.memory_share


def rates(name: str, assumptions: Assumptions = TRAINING, measured: Path | None = None) -> Rates:
    """Return achieved rates of a GPU: measured ones if any, else shares of the data sheet.

    Args:
        name: One of :data:`ACCELERATORS`.
        assumptions: The shares: those of training, or :data:`fastfold.parallel.planner.calibration.FOLDING`.
        measured: See :func:`fastfold.parallel.planner.hardware.read_measured`; None for none.

    Raises:
        ConfigError: The GPU is unknown, or the measurements cannot be read or are of another GPU.
    """
    sheet = accelerator(name)
    matrix = {dtype: rate * assumptions.matrix_share for dtype, rate in sheet.matrix_rates.items()}
    shares = {f"matrix_rates.{dtype}": assumptions.matrix_share for dtype in matrix}
    shares |= dict.fromkeys(LINKS, assumptions.link_share) | {"bandwidth": assumptions.bandwidth_share}
    origin = {
        key: f"tabulated ({sheet.sources[key.removeprefix('matrix_rates.')]}), {share:.3g} of it taken"
        for key, share in shares.items()
    }
    values = {key: getattr(sheet, key) * shares[key] for key in LINKS}
    if measured is not None:
        found = read_measured(measured, sheet.name)
        for dtype, rate in found.get("matrix_rates", {}).items():
            matrix[dtype], origin[f"matrix_rates.{dtype}"] = rate, f"measured ({measured.name})"
        for key in LINKS:
            if key in found:
                values[key], origin[key] = found[key], f"measured ({measured.name})"
    return Rates(matrix, sheet=sheet, assumptions=assumptions, origin=origin, **values)
