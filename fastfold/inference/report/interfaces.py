"""One table of all interface scores in a folder of results: a line for each pair of chains of each prediction."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError, InputError
from fastfold.inference.output.written_scores import MAX_SCORES_BYTES
from fastfold.inference.report.discover import FoundPrediction, find_predictions
from fastfold.inference.report.guard import check_size, leaving_out
from fastfold.protein.protein import chain_name

_OF_PAIR = {
    "ipsae": "ipsae",
    "pdockq": "pdockq",
    "pdockq2": "pdockq2",
    "lis": "lis",
    "actifptm": "actifptm",
    "pair_iptm": "iptm",
    "contacts": "contacts",
    "interface_plddt": "interface_plddt",
    "interface_pae": "interface_pae",
    "pair_clashes": "clashes",
    "ipsae_d0chn": "ipsae_d0chn",
    "ipsae_d0dom": "ipsae_d0dom",
}
_OF_ALL = ("mean_plddt", "ptm", "iptm", "ranking_confidence")
_OF_INTERFACES = ("ipsae_max", "clashes")
TEXT_COLUMNS = ("target", "partner_1", "partner_2", "chain_1", "chain_2", "model", "files")
COLUMNS = (*TEXT_COLUMNS[:5], "rank", "model", "seed", *_OF_PAIR, *_OF_ALL, *_OF_INTERFACES, "files")
"""Columns of the table; ``docs/scores.md`` explains the scores. ``files`` is the common part of files' names."""
SORTED_BY = "ipsae"

_LONGEST_NAME = 200

Row = Mapping[str, str | float | int | None]


def find_rows(directory: Path, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Return the lines of all complexes in a folder of results.

    Raises:
        InputError: The folder cannot be read.
    """
    try:
        predictions = find_predictions(directory, say)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=directory) from error
    return [row for prediction in predictions for row in rows_of(prediction, say)]


def rows_of(prediction: FoundPrediction, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Return the lines of one prediction, in the order of its chains; none of a single chain.

    Args:
        prediction: The prediction.
        say: Told of files that are left out.

    Returns:
        Values by :data:`COLUMNS`; None for scores that the prediction lacks.
    """
    scores = prediction.scores
    number = len(scores["sequences"])
    if number < 2:
        return []
    interfaces = scores.get("interfaces")
    interfaces = interfaces if isinstance(interfaces, dict) else {}
    pairs = interfaces.get("pairs")
    pairs = pairs if isinstance(pairs, dict) else {}
    names = _partners(prediction, number, say)
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
        pair = pairs.get(f"{chain_name(i)}-{chain_name(j)}")
        pair = pair if isinstance(pair, dict) else {}
        row = common | {key: _number(pair.get(name)) for key, name in _OF_PAIR.items()}
        row |= {"partner_1": names[i], "partner_2": names[j]}
        row |= {"chain_1": chain_name(i), "chain_2": chain_name(j)}
        rows.append({column: row[column] for column in COLUMNS})
    return rows


def sort_rows(rows: Sequence[Row], column: str) -> list[Row]:
    """Return lines by a column: numbers from the largest, text from A, missing values last.

    Raises:
        ConfigError: The column is unknown.
    """
    if column not in COLUMNS:
        raise ConfigError(f"--sort: no column {column!r}; the columns are {', '.join(COLUMNS)}")

    def key(row: Row) -> tuple[Any, ...]:
        value = row[column]
        order = -value if isinstance(value, int | float) else value or ""
        return value is None, order, row["target"], row["rank"] or 0, row["chain_1"], row["chain_2"]

    return sorted(rows, key=key)


def _partners(prediction: FoundPrediction, number: int, say: Callable[[str], None]) -> list[str]:
    """Return the names of the proteins of all chains, with the parts that were folded."""
    config: Any = None
    path = prediction.files.get("_config.json")
    if path is not None:
        with leaving_out(path.name, say):
            config = json.loads(check_size(path, MAX_SCORES_BYTES).read_bytes())
    names, regions = (_mapping(config, key) for key in ("chain_names", "residue_ranges"))
    parts = prediction.target.split("_and_")
    partners = []
    for i, chain in enumerate(map(chain_name, range(number))):
        name = names.get(chain)
        if isinstance(name, str) and name:
            name += "".join(f"_{'-'.join(map(str, part))}" for part in regions.get(chain) or ())
        else:
            name = parts[i] if len(parts) == number else f"{prediction.target}_{chain}"
        partners.append(name[:_LONGEST_NAME])
    return partners


def _mapping(config: Any, key: str) -> dict[str, Any]:
    """Return a mapping of a settings file, which may come from anywhere."""
    value = config.get(key) if isinstance(config, dict) else None
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
