"""Rates of accelerators and their links: tabulated from vendors' data sheets, or measured."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastfold.errors import ConfigError
from fastfold.parallel.measured_rates import LINKS, read_measured


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
        launch_seconds: For a kernel to start, beside its work.
        latency_seconds: For a message to arrive, beside its bytes.
        memory_share: Of a GPU's memory that a plan may fill: fragments and the libraries need the rest.
        hidden_share: Of the communication inside the model that runs beside computation.
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
        measured: See :func:`fastfold.parallel.measured_rates.read_measured`; None for none.

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
