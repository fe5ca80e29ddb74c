"""Tables as files: CSV, TSV and Parquet, by the ending of the name."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from fastfold.errors import ConfigError
from fastfold.inference.report.interfaces import COLUMNS, TEXT_COLUMNS, Row
from fastfold.utils.atomic_files import replacing, write_atomic
from fastfold.utils.packages import require_package

INTERFACES = "interfaces.csv"  #: Name of the table in a folder of results
_WHOLE = frozenset(("rank", "seed", "contacts", "pair_clashes", "clashes"))
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def check_export(path: Path) -> Path:
    """Return the path of a table whose format can be written, or raise ConfigError."""
    if path.suffix == ".parquet":
        require_package("pyarrow", f"{path}: a Parquet file")
    elif path.suffix not in _DELIMITERS:
        raise ConfigError(f"{path}: expected a name that ends in .csv, .tsv or .parquet")
    return path


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write lines of :data:`~fastfold.inference.report.interfaces.COLUMNS` to a file, in the format of its ending.

    Errors are those of :func:`check_export`, and of a file that cannot be written; an existing one stays as it is.
    """
    check_export(path)
    if path.suffix == ".parquet":
        _write_parquet(rows, path)
        return
    text = io.StringIO()
    writer = csv.writer(text, delimiter=_DELIMITERS[path.suffix], lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(["" if row[column] is None else row[column] for column in COLUMNS] for row in rows)
    write_atomic(path, text.getvalue())


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    kinds = {name: pyarrow.string() for name in TEXT_COLUMNS} | {name: pyarrow.int64() for name in _WHOLE}
    schema = pyarrow.schema([(column, kinds.get(column, pyarrow.float64())) for column in COLUMNS])
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), temporary)
