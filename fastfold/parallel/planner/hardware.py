"""Rates of accelerators and their links: tabulated from vendors' data sheets, or measured."""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
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
            ``benchmarks/kernels/run.py`` writes, ``kernels_<gpu>_<dtype>.csv``: then our operators' median rates count,
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
            raise ConfigError(f"{path}: {number!r} is not a rate; rates are numbers above 0")
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
        # What was not measured is not a number.
        if of_product >= of_copy:
            products.append(rate * 1e12)
        elif of_copy > of_product:
            copies.append(copied * 1e9)
    if not products:
        raise ConfigError(f"{path}: no operator of ours was measured")
    found: dict[str, Any] = {"matrix_rates": {dtype: statistics.median(products)}}
    return found | ({"bandwidth": statistics.median(copies)} if copies else {})


@dataclass(frozen=True)
class Accelerator:
    """One GPU, the machine it sits in, and its network.

    Attributes:
        name: As it is asked for.
        memory: Bytes.
        matrix_rates: FLOP/s of dense matrix products by dtype, ``bfloat16`` and ``float32``.
        bandwidth: Bytes/s of its memory.
        link: Bytes/s that it sends to the others in its machine.
        per_machine: GPUs in one machine.
        network: Bytes/s that it sends to other machines.
        source: Where the numbers are from.
    """

    name: str
    memory: float
    matrix_rates: Mapping[str, float]
    bandwidth: float
    link: float
    per_machine: int
    network: float
    source: str


def _sheet(
    name: str,
    *,
    gigabytes: float,
    bf16: float,
    fp32: float,
    terabytes_per_second: float,
    nvlink: float,
    network: float,
    source: str,
) -> Accelerator:
    """Numbers as the sheets print them: TFLOP/s, both directions of NVLink in GB/s, network in Gbit/s."""
    rates = {"bfloat16": bf16 * 1e12, "float32": fp32 * 1e12}
    return Accelerator(
        name,
        gigabytes * 1e9,
        rates,
        terabytes_per_second * 1e12,
        nvlink / 2 * 1e9,
        8,
        network / 8 * 1e9,
        source,
    )


ACCELERATORS: dict[str, Accelerator] = {
    sheet.name: sheet
    for sheet in (
        _sheet(
            "a100-40gb",
            gigabytes=40,
            bf16=312,
            fp32=19.5,
            terabytes_per_second=1.555,
            nvlink=600,
            network=200,
            source="NVIDIA A100 data sheet (SXM, 40 GB); DGX A100: 8 x HDR InfiniBand",
        ),
        _sheet(
            "a100",
            gigabytes=80,
            bf16=312,
            fp32=19.5,
            terabytes_per_second=2.039,
            nvlink=600,
            network=200,
            source="NVIDIA A100 data sheet (SXM, 80 GB); DGX A100: 8 x HDR InfiniBand",
        ),
        _sheet(
            "h100",
            gigabytes=80,
            bf16=989.4,
            fp32=67,
            terabytes_per_second=3.35,
            nvlink=900,
            network=400,
            source="NVIDIA H100 data sheet (SXM), without sparsity; DGX H100: 8 x NDR InfiniBand",
        ),
        _sheet(
            "h200",
            gigabytes=141,
            bf16=989.4,
            fp32=67,
            terabytes_per_second=4.8,
            nvlink=900,
            network=400,
            source="NVIDIA H200 data sheet (SXM), without sparsity; DGX H200: 8 x NDR InfiniBand",
        ),
        _sheet(
            "b200",
            gigabytes=180,
            bf16=2250,
            fp32=75,
            terabytes_per_second=7.7,
            nvlink=1800,
            network=400,
            source="NVIDIA HGX B200 data sheet, without sparsity; DGX B200: 8 x NDR InfiniBand",
        ),
    )
}
"""Data sheets by name."""


def accelerator(name: str) -> Accelerator:
    """The data sheet of a GPU.

    Raises:
        ConfigError: There is none of that name; the nearest is given.
    """
    known = name.lower().removeprefix("nvidia").strip(" -_")
    if known in ACCELERATORS:
        return ACCELERATORS[known]
    close = difflib.get_close_matches(known, ACCELERATORS, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"there is no table of a GPU named {name!r}; did you mean {close!r}? Known are {', '.join(ACCELERATORS)}"
    )


@dataclass(frozen=True)
class Assumptions:
    """What no table says. Shares are of tabulated rates; measured ones are taken as they are.

    Attributes:
        matrix_share: Of the matrix rate, in the products of a network.
        bandwidth_share: Of the memory's bandwidth.
        link_share: Of links and network.
        launch_seconds: For a kernel to start, in addition to its work.
        latency_seconds: For a message to arrive, in addition to its bytes.
        memory_share: Of a GPU's memory that a plan may fill: fragments and the libraries need the rest.
        hidden_share: Of the communication inside the model that overlaps with computation.
    """

    matrix_share: float = 0.5
    bandwidth_share: float = 0.75
    link_share: float = 0.8
    launch_seconds: float = 4e-6
    latency_seconds: float = 10e-6
    memory_share: float = 0.9
    hidden_share: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What the cost model computes with.

    Attributes:
        matrix: Achieved FLOP/s by dtype.
        bandwidth: Achieved bytes/s of the memory.
        link: Achieved bytes/s within a machine.
        network: Achieved bytes/s between machines.
        sheet: The accelerator.
        assumptions: What no table says.
        origin: For each number, by its name in the sheet, where it is from.
    """

    matrix: Mapping[str, float]
    bandwidth: float
    link: float
    network: float
    sheet: Accelerator
    assumptions: Assumptions
    origin: Mapping[str, str]

    @property
    def usable_memory(self) -> float:
        """Bytes that a plan may fill."""
        return self.sheet.memory * self.assumptions.memory_share


def rates(name: str, assumptions: Assumptions | None = None, measured: Path | None = None) -> Rates:
    """Achieved rates of a GPU: measured where there are measurements, else shares of the data sheet.

    Args:
        name: One of :data:`ACCELERATORS`.
        assumptions: The shares; the defaults if None.
        measured: See :func:`fastfold.parallel.planner.hardware.read_measured`; None for none.

    Raises:
        ConfigError: No such GPU, or the measurements cannot be read or are of another one.
    """
    sheet, assumptions = accelerator(name), assumptions or Assumptions()
    table = f"tabulated ({sheet.source})"
    matrix = {dtype: rate * assumptions.matrix_share for dtype, rate in sheet.matrix_rates.items()}
    origin = {f"matrix_rates.{dtype}": f"{table}, {assumptions.matrix_share:.0%} assumed" for dtype in matrix}
    values = {
        "bandwidth": sheet.bandwidth * assumptions.bandwidth_share,
        "link": sheet.link * assumptions.link_share,
        "network": sheet.network * assumptions.link_share,
    }
    for key, share in zip(LINKS, (assumptions.bandwidth_share, *2 * (assumptions.link_share,)), strict=True):
        origin[key] = f"{table}, {share:.0%} assumed"
    if measured is not None:
        found = read_measured(measured, sheet.name)
        for dtype, rate in found.get("matrix_rates", {}).items():
            matrix[dtype], origin[f"matrix_rates.{dtype}"] = rate, f"measured ({measured.name})"
        for key in LINKS:
            if key in found:
                values[key], origin[key] = found[key], f"measured ({measured.name})"
    return Rates(matrix, values["bandwidth"], values["link"], values["network"], sheet, assumptions, origin)
