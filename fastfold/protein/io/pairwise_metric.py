"""Table of a metric of all pairs of residues in a ModelCIF file, ``_ma_qa_metric_local_pairwise``.

The ``modelcif`` package writes such tables from an object per pair, which takes minutes for a long protein.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CATEGORY = "_ma_qa_metric_local_pairwise"
_RESIDUE = ("label_asym_id", "label_seq_id", "label_comp_id")
_COLUMNS = (
    *("ordinal_id", "model_id", *(f"{name}_{end}" for end in (1, 2) for name in _RESIDUE)),
    *("metric_id", "metric_value"),
)


def two_decimals(values: np.ndarray, *, end: str = "") -> Iterator[np.ndarray]:
    """Yield the rows of a matrix ``[N, N]`` of numbers from 0 as bytes, with at most two decimals.

    ``end`` follows each number. A table of all hundredths is faster than formatting each number.
    """
    hundredths = range(round(100 * float(values.max())) + 1)
    table = np.array([f"{number / 100:g}{end}".encode() for number in hundredths])
    for row in values:
        yield table[np.rint(100 * row.astype(np.float64)).astype(np.intp)]


def pairwise_metric(name: str, kind: type, description: str, software: Any) -> Any:
    """Return the definition of a metric of pairs for ``qa_metrics`` of a model, without values.

    ``kind`` is a type of metric of the ``modelcif`` package.
    """
    members = {"mode": "local-pairwise", "name": name, "description": description, "software": software}
    return type(name, (kind,), members)()


def has_pairwise_metric(path: Path) -> bool:
    """Return True if a ModelCIF file has the table."""
    with path.open("rb") as file:
        return any(line.startswith(f"{_CATEGORY}.".encode()) for line in file)


def pairwise_dumper(metric: Any, residues: Sequence[Any], values: np.ndarray) -> type:
    """Return a class for the ``dumpers`` of ``modelcif``, which writes the rows of a metric of one model.

    Args:
        metric: Definition by :func:`pairwise_metric`.
        residues: The N residues of ``modelcif``.
        values: ``[N, N]``, first residue by row, from 0; written with two decimals.
    """
    import ihm.dumper

    class PairwiseDumper(ihm.dumper.Dumper):
        """Writer of the table, at the end of the file."""

        def dump(self, system: Any, writer: Any) -> None:
            (model,) = (model for _, model in system._all_models())
            # The identifiers are known only after the tables of chains and metrics are numbered.
            names = [
                f"{residue.asym._id} {residue.seq_id} {residue.asym.entity.sequence[residue.seq_id - 1].id}"
                for residue in residues
            ]
            seconds = [f"{name} {metric._id} " for name in names]
            writer.fh.write("#\nloop_\n" + "".join(f"{_CATEGORY}.{column}\n" for column in _COLUMNS))
            number = 0
            for first, row in zip(names, two_decimals(values), strict=True):
                head = f" {model._id} {first} "
                rows = zip(range(number + 1, number + 1 + len(row)), seconds, row.tolist(), strict=True)
                writer.fh.write("".join(f"{n}{head}{second}{value.decode()}\n" for n, second, value in rows))
                number += len(row)
            writer.fh.write("#\n")

    return PairwiseDumper
