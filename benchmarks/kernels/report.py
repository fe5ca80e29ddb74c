"""Results of the kernels' benchmark as CSV, Markdown and plots."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fastfold.utils.atomic_files import write_atomic


@dataclass(frozen=True)
class Row:
    """Result of one measurement.

    Attributes:
        operator: Name of the operator.
        shape: Size in words.
        residues: N.
        direction: ``forward`` or ``forward+backward``.
        implementation: Name of the implementation.
        milliseconds: Median of a call on the device; NaN without a time.
        host_milliseconds: Median of a call on the host, until it returns.
        spread: Half of the interquartile range, over the median.
        peak_u: Memory of a call above its inputs, in pair tensors.
        tflops: Achieved rate, counting the necessary operations.
        of_product: That over the rate of a matrix product in the same run.
        gbs: Achieved rate, counting the necessary bytes.
        of_copy: That over the rate of a copy in the same run.
        note: Reason for a missing time.
    """

    operator: str
    shape: str
    residues: int
    direction: str
    implementation: str
    milliseconds: float = math.nan
    host_milliseconds: float = math.nan
    spread: float = math.nan
    peak_u: float = math.nan
    tflops: float = math.nan
    of_product: float = math.nan
    gbs: float = math.nan
    of_copy: float = math.nan
    note: str = ""


def write_report(folder: Path, name: str, heading: list[str], rows: list[Row]) -> list[Path]:
    """Write ``<name>.csv``, ``<name>.md`` and a plot per operator.

    Args:
        folder: Created if missing.
        name: Beginning of the files' names.
        heading: Paragraphs above the table: machine, versions, ceilings, missing runs.
        rows: Measurements.

    Returns:
        Paths of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    writer = csv.DictWriter(table, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    written = [folder / f"{name}.csv", folder / f"{name}.md"]
    write_atomic(written[0], table.getvalue())
    write_atomic(written[1], "\n".join([*heading, "", *_markdown(rows)]) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed")
        return written
    for operator in dict.fromkeys(row.operator for row in rows):
        found = [row for row in rows if row.operator == operator and not math.isnan(row.milliseconds)]
        if found:
            path = folder / f"{name}_{operator}.png"
            write_atomic(path, _plot(operator, heading[0].removeprefix("# "), found))
            written.append(path)
    return written


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _markdown(rows: list[Row]) -> list[str]:
    header = ["operator", "shape", "direction", "implementation", "ms", "host ms", "±", "peak U", "TFLOP/s"]
    header += ["of product", "GB/s", "of copy", "over ours"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    ours = {
        (r.operator, r.shape, r.direction): r.milliseconds for r in rows if r.implementation == "fastfold"
    }
    for r in rows:
        ratio = r.milliseconds / ours.get((r.operator, r.shape, r.direction), math.nan)
        cells = [r.operator, r.shape, r.direction, r.implementation]
        cells += [r.note or _number(r.milliseconds, 3), _number(r.host_milliseconds, 3)]
        cells += [_number(r.spread, 2), _number(r.peak_u, 2)]
        cells += [_number(r.tflops, 1), _number(r.of_product, 2), _number(r.gbs, 0), _number(r.of_copy, 2)]
        lines.append("| " + " | ".join([*cells, _number(ratio, 2)]) + " |")
    return lines


def _plot(operator: str, machine: str, rows: list[Row]) -> bytes:
    """Plot time against size, one panel for each direction, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directions = list(dict.fromkeys(row.direction for row in rows))
    figure, axes = pyplot.subplots(1, len(directions), figsize=(5 * len(directions), 4), squeeze=False)
    for axis, direction in zip(axes[0], directions, strict=True):
        here = [row for row in rows if row.direction == direction]
        for implementation in dict.fromkeys(row.implementation for row in here):
            line = sorted((r.residues, r.milliseconds) for r in here if r.implementation == implementation)
            style = "-o" if implementation == "fastfold" else "--s"
            axis.plot(*zip(*line, strict=True), style, label=implementation, markersize=4)
        axis.set(title=direction, xlabel="N", ylabel="ms", xscale="log", yscale="log")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(f"{operator}: {machine}", fontsize=9)
    picture = io.BytesIO()
    figure.tight_layout()
    figure.savefig(picture, format="png", dpi=110)
    pyplot.close(figure)
    return picture.getvalue()
