"""Rates of accelerators and their links, and constants that data sheets lack.

Rates are measured, or tabulated from vendors' data sheets in ``accelerators.json`` with the source of each figure. The
constants (shares of rates, launches, latencies) are in ``calibration.json``, which says of each whether it was fitted,
and to which data, or assumed, and has published steps to check them.
``benchmarks/published_steps.py`` checks the model against the published steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError, suggest
from fastfold.utils.foreign_text import package_json, parse_json, read_settings_text, table_rows


@dataclass(frozen=True)
class Assumptions:
    """Constants that data sheets lack. Shares apply to tabulated rates; measured rates are used unchanged."""

    matrix_share: float  #: Share of the matrix rate in the products of a network
    attention_share: float  #: Share of the matrix rate in the products of a fused attention
    bandwidth_share: float  #: Share of the memory's bandwidth
    link_share: float  #: Share of links and network
    #: Seconds in which the host launches a kernel or a whole graph: the minimum time of either
    launch_seconds: float
    kernel_seconds: float  #: Seconds of a kernel on the device in addition to its work
    latency_seconds: float  #: Seconds until a message arrives, in addition to its bytes
    #: Share of a GPU's memory that a plan may fill; the rest is for fragmentation and libraries
    memory_share: float
    hidden_share: float  #: Share of the communication inside the model that overlaps with computation
    imbalance: float  #: Time of the slowest rank divided by the mean; 1 for none
    #: Share of the shorter of an operator's products and memory traffic that adds to the longer one
    additive: float
    score_instructions: float  #: Instructions of a softmax for each score
    #: Share of the computation that overlaps with messages of gradients and parameters
    hidden_synchronization: float
    sources: Mapping[str, str] = field(compare=False, repr=False)  #: Source of each constant, by its name
    graphed: bool = False  #: True if each block's kernels are launched as one CUDA graph


def _constants(table: Mapping[str, Mapping[str, Any]]) -> Assumptions:
    sources = {name: row["source"] for name, row in table.items()}
    return Assumptions(**{name: row["value"] for name, row in table.items()}, sources=sources)


_MAX_MEASUREMENTS = 1 << 24  # bytes
_TABLE: dict[str, Any] = package_json("fastfold.parallel.planner", "calibration.json")

TRAINING = _constants(_TABLE["training"])  #: Constants of training steps, fitted to published values
GENERAL = _constants(_TABLE["general"])
"""Constants of training steps of general models; ``benchmarks/published_models.py`` checks them."""
FOLDING = _constants(_TABLE["folding"])  #: Constants of long folds; assumed
PUBLISHED_VALUES = len(_TABLE["published"])
"""Number of published values that check :data:`TRAINING`; see ``benchmarks/published_steps.py``."""
WITHIN: float = _TABLE["within"]  #: Factor within which the model predicts every published value
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
        ConfigError: The file is of another GPU, or has other contents.
        InputError: The file cannot be read.
    """
    text = read_settings_text(path, limit=_MAX_MEASUREMENTS)
    numbers = _of_kernels(path, text, gpu) if path.suffix == ".csv" else _of_json(path, text, gpu)
    table = numbers.get("matrix_rates", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: matrix_rates: expected an object of FLOP/s by dtype")
    if set(table) - set(_DTYPES):
        raise ConfigError(f"{path}: matrix_rates: expected {' and '.join(_DTYPES)}, found {', '.join(table)}")
    for number in (*(numbers[key] for key in LINKS if key in numbers), *table.values()):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ConfigError(f"{path}: expected rates above 0, found {number!r}")
    return numbers


def _of_json(path: Path, text: str, gpu: str) -> dict[str, Any]:
    rates = parse_json(text, path)
    known = {"gpu", "matrix_rates", *LINKS}
    if not isinstance(rates, dict) or set(rates) - known:
        raise ConfigError(f"{path}: expected a JSON object with {', '.join(sorted(known))}")
    if rates.pop("gpu", None) != gpu:
        raise ConfigError(f'{path}: expected rates of {gpu!r}; the file has to contain "gpu": "{gpu}"')
    return rates


def _of_kernels(path: Path, text: str, gpu: str) -> dict[str, Any]:
    words = path.stem.lower().split("_")
    dtype = next((dtype for dtype in _DTYPES if dtype in words), None)
    if gpu.partition("-")[0] not in words or dtype is None:
        raise ConfigError(f"{path}: expected a table of {gpu!r}, named kernels_..._{gpu}_..._<dtype>.csv")
    products, copies = [], []
    (_, header), *rows = table_rows(text, path, ",") or [(1, [])]
    for line, cells in rows:
        row = dict(zip(header, cells, strict=False))
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
    numbers: dict[str, Any] = {"matrix_rates": {dtype: statistics.median(products)}}
    return numbers | ({"bandwidth": statistics.median(copies)} if copies else {})


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


# Link rates of the table are of both directions together.
ACCELERATORS: dict[str, Accelerator] = {
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
    for name, row in package_json("fastfold.parallel.planner", "accelerators.json").items()
}
"""Data sheets by name."""


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
        assumptions: The shares: those of training, or :data:`fastfold.parallel.planner.hardware.FOLDING`.
        measured: See :func:`fastfold.parallel.planner.hardware.read_measured`; None for none.

    Raises:
        ConfigError: The GPU is unknown, or the measurements are of another GPU.
        InputError: The measurements cannot be read.
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
        numbers = read_measured(measured, sheet.name)
        for dtype, rate in numbers.get("matrix_rates", {}).items():
            matrix[dtype], origin[f"matrix_rates.{dtype}"] = rate, f"measured ({measured.name})"
        for key in LINKS:
            if key in numbers:
                values[key], origin[key] = numbers[key], f"measured ({measured.name})"
    return Rates(matrix, sheet=sheet, assumptions=assumptions, origin=origin, **values)
