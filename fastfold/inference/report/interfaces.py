"""One table of all interface scores in a folder of results, and conditions on its lines."""

from __future__ import annotations

import ast
import csv
import io
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fastfold.errors import ConfigError, suggest
from fastfold.inference.output.score_files import is_number, mapping_of, scored_names
from fastfold.inference.report.discover import FoundPrediction, find_predictions, leaving_out, read_json
from fastfold.protein.metrics.interface.scores import pair_keys
from fastfold.protein.metrics.scores import LARGEST_OF_PAIRS, PAIR_SCORES, SCORES
from fastfold.utils.atomic_files import replacing, write_atomic
from fastfold.utils.packages import require_package

_OF_PAIR = tuple(one.name for one in PAIR_SCORES)
_OF_ALL = ("mean_plddt", "ptm", "iptm", "ranking_confidence")
_OF_INTERFACES = (*LARGEST_OF_PAIRS, "clashes")
TEXT_COLUMNS = ("target", "partner_1", "partner_2", "chain_1", "chain_2", "model", "files")
COLUMNS = (*TEXT_COLUMNS[:5], "rank", "model", "seed", *_OF_PAIR, *_OF_ALL, *_OF_INTERFACES, "files")
"""Columns of the table; ``docs/scores.md`` explains the scores. ``files`` is the common part of files' names."""
SORTED_BY = "ipsae"

_LONGEST_NAME = 200

Row = Mapping[str, str | float | int | None]


def find_rows(directory: Path, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Return the lines of all complexes in a folder of results; errors as those of :func:`find_predictions`."""
    return [row for prediction in find_predictions(directory, say) for row in rows_of(prediction, say)]


def rows_of(prediction: FoundPrediction, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Return the lines of a prediction's pairs of chains by :data:`COLUMNS`; missing scores are None."""
    scores = prediction.scores
    ids = scored_names(scores).chain_ids
    number = len(ids)
    if number < 2:
        return []
    interfaces = mapping_of(scores, "interfaces")
    pairs = mapping_of(interfaces, "pairs")
    keys, names = pair_keys(ids), _partners(prediction, ids, say)
    common: dict[str, Any] = {
        "target": prediction.target,
        "rank": prediction.rank,
        "model": scores["model"],
        "seed": scores["seed"],
        **{key: _number(scores.get(key)) for key in _OF_ALL},
        **{key: _number(interfaces.get(key)) for key in _OF_INTERFACES},
        "files": prediction.stem,
    }
    rows: list[Row] = []
    for i, j in itertools.combinations(range(number), 2):
        pair = mapping_of(pairs, keys[i, j])
        row = common | {one.name: _number(pair.get(one.key)) for one in PAIR_SCORES}
        row |= {"partner_1": names[i], "partner_2": names[j]}
        row |= {"chain_1": ids[i], "chain_2": ids[j]}
        rows.append({column: row[column] for column in COLUMNS})
    return rows


def sort_rows(rows: Sequence[Row], column: str) -> list[Row]:
    """Return lines by a column: numbers from the largest, text from A, missing last; or raise ConfigError."""
    if column not in COLUMNS:
        raise ConfigError(f"`sort`: no column {column!r}; the columns are {', '.join(COLUMNS)}")

    def key(row: Row) -> tuple[Any, ...]:
        value = row[column]
        order = -value if isinstance(value, int | float) else value or ""
        return value is None, order, row["target"], row["rank"] or 0, row["chain_1"], row["chain_2"]

    return sorted(rows, key=key)


def _partners(prediction: FoundPrediction, chain_ids: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Return the names of the proteins of all chains, with the parts that were folded."""
    config: ConfigDict = None
    if (path := prediction.files.get("_config.json")) is not None:
        with leaving_out(path.name, say):
            config = read_json(path)
    names, regions = (mapping_of(config, key) for key in ("chain_names", "residue_ranges"))
    parts = str(prediction.scores["name"]).split("_and_")
    partners = []
    keys = itertools.chain(names, itertools.repeat(""))  # in the order of the chains
    for i, (chain, key) in enumerate(zip(chain_ids, keys, strict=False)):
        name = names.get(key)
        if isinstance(name, str) and name:
            name += "".join(f"_{'-'.join(map(str, part))}" for part in regions.get(key) or ())
        else:
            name = parts[i] if len(parts) == len(chain_ids) else f"{prediction.target}_{chain}"
        partners.append(name[:_LONGEST_NAME])
    return partners


def _number(value: Any) -> float | int | None:
    return value if is_number(value) else None


INTERFACES = "interfaces.csv"  #: Name of the table in a folder of results
_WHOLE = frozenset(("rank", "seed", *(one.name for one in SCORES if one.is_count)))
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def check_export(path: Path) -> Path:
    """Return the path of a table whose format can be written, or raise ConfigError."""
    if path.suffix == ".parquet":
        require_package("pyarrow", f"{path}: a Parquet file")
    elif path.suffix not in _DELIMITERS:
        raise ConfigError(f"{path}: expected a name that ends in .csv, .tsv or .parquet")
    return path


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write lines to a file in the format of its ending, whole or not at all; errors as of :func:`check_export`."""
    check_export(path)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        kinds = dict.fromkeys(TEXT_COLUMNS, pyarrow.string()) | dict.fromkeys(_WHOLE, pyarrow.int64())
        schema = pyarrow.schema([(column, kinds.get(column, pyarrow.float64())) for column in COLUMNS])
        with replacing(path) as temporary:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), temporary)
        return
    text = io.StringIO()
    writer = csv.writer(text, delimiter=_DELIMITERS[path.suffix], lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(["" if row[column] is None else row[column] for column in COLUMNS] for row in rows)
    write_atomic(path, text.getvalue())


Condition = Callable[[Mapping[str, Any]], bool]

_MAX_LENGTH = 1000
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def parse_condition(text: str, columns: Sequence[str]) -> Condition:
    """Parse a condition, and return a function that tells of a line if it meets it, or raise ConfigError.

    Comparisons (``>``, ``>=``, ``<``, ``<=``, ``==``, ``!=``, ``in``) of columns with numbers or quoted text are joined
    by ``and``, ``or`` and ``not``. ``"P1" in partner_1`` looks for a part of a text. A comparison with a missing value
    is false.
    """
    try:
        if len(text) > _MAX_LENGTH:
            raise SyntaxError
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _not_understood(text[:60]) from None
    return _condition(tree.body, columns)


def _condition(node: ast.expr, columns: Sequence[str]) -> Condition:
    match node:
        case ast.BoolOp(op=op, values=values):
            parts = [_condition(value, columns) for value in values]
            combine = all if isinstance(op, ast.And) else any
            return lambda row: combine(part(row) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _condition(operand, columns)
            return lambda row: not inner(row)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [_value(one, columns) for one in (left, *comparators)]
            tests = [_comparison(op, node) for op in ops]
            return lambda row: all(
                _holds(test, sides[i](row), sides[i + 1](row)) for i, test in enumerate(tests)
            )
    raise _not_understood(ast.unparse(node))


def _comparison(op: ast.cmpop, node: ast.expr) -> Callable[[Any, Any], bool]:
    if isinstance(op, ast.In):
        return lambda part, whole: isinstance(whole, str) and str(part) in whole
    if type(op) not in _COMPARISONS:
        raise _not_understood(ast.unparse(node))
    return _COMPARISONS[type(op)]


def _holds(test: Callable[[Any, Any], bool], one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    try:
        return test(one, other)
    except TypeError:  # a number and a text
        return False


def _value(node: ast.expr, columns: Sequence[str]) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function that reads a side of a comparison."""
    match node:
        case ast.Constant(value=int() | float() | str() as constant):
            return lambda row: constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as constant)):
            return lambda row: -constant
        case ast.Name(id=name) if name in columns:
            return lambda row: row.get(name)
        case ast.Name(id=name):
            hint = suggest(name, columns, otherwise=f"the columns are {', '.join(columns)}")
            raise ConfigError(f"`where`: no column {name!r}; {hint}")
    raise _not_understood(ast.unparse(node))


def _not_understood(text: str) -> ConfigError:
    return ConfigError(f'`where`: expected a condition such as "ipsae_max>0.5 and rank==1", found {text!r}')
