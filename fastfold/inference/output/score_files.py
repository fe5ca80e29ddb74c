"""JSON files of a structure: scores, and the predicted aligned error in the format of AlphaFold DB."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastfold.errors import InputError
from fastfold.protein.io.pairwise_metric import two_decimals
from fastfold.protein.labels import AuthorNames, default_names, numbers_of_ranges
from fastfold.protein.protein import Protein, chain_name
from fastfold.utils.foreign_text import parse_json, read_json_object
from fastfold.utils.text_files import check_listed, read_text_bytes

SCHEMA_VERSION = 1  #: Version of the scores file; raised when a key is removed or changes its meaning
BACKBONE = ("N", "CA", "C", "O")  #: Atoms of a reference that its file of scores has
ReferenceKind = Literal["experiment", "model", "structure"]
"""Kinds of references; ``structure`` if the file names no method."""

_LARGEST = 1e300


def rounded(values: np.ndarray | float | None, digits: int) -> Any:
    """Convert an array to numbers rounded to ``digits`` decimals, for JSON; None stays None."""
    return None if values is None else np.round(np.asarray(values, np.float64), digits).tolist()


def rounded_tree(values: Any, digits: int) -> Any:
    """Round every float in dictionaries and lists to ``digits`` decimals."""
    return map_floats(values, lambda value: round(value, digits))


def map_floats(values: Any, function: Callable[[float], Any]) -> Any:
    """Replace every float in dictionaries and lists by the result of a function."""
    if isinstance(values, dict):
        return {key: map_floats(value, function) for key, value in values.items()}
    if isinstance(values, list):
        return [map_floats(value, function) for value in values]
    return function(values) if isinstance(values, float) else values


def is_number(value: Any) -> bool:
    """Return True for a number of a JSON file that is finite, and not True or False."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def mapping_of(values: Any, key: str) -> dict[str, Any]:
    """Return a mapping in the content of a file, which may come from anywhere; empty for anything else."""
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, dict) else {}


def lines_json(values: Mapping[str, Any]) -> str:
    """Format a JSON object with one key per line, or raise ValueError for a number that is not finite."""
    lines = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in values.items()
    )
    return f"{{\n{lines}\n}}\n"


def pae_json(pae: np.ndarray, max_pae: float) -> bytes:
    """Return the predicted aligned error in the format of AlphaFold DB, with two decimals.

    A list of one object with ``predicted_aligned_error``, rows in Å, and ``max_predicted_aligned_error``. The element
    (i, j) is the error at residue j when aligned on residue i.

    Args:
        pae: ``[N, N]`` float, finite, nonnegative, in Å.
        max_pae: Largest error that the network can predict, in Å (31.75 for AlphaFold's networks).
    """
    end = json.dumps(round(float(max_pae), 4), allow_nan=False).encode("ascii")
    return b'[{"predicted_aligned_error":' + _matrix(pae) + b',"max_predicted_aligned_error":' + end + b"}]\n"


def colabfold_json(
    plddt: np.ndarray, *, pae: np.ndarray | None = None, ptm: float | None = None, iptm: float | None = None
) -> bytes:
    """Return ColabFold's scores file: ``plddt``, and the given ones of ``max_pae``, ``pae``, ``ptm``, ``iptm``.

    Args:
        plddt: ``[N]``, 0 to 100.
        pae: ``[N, N]`` in Å; ``max_pae`` is its largest number, as in ColabFold.
        ptm: 0 to 1.
        iptm: 0 to 1.
    """
    fields = {"plddt": json.dumps(rounded(plddt, 2), allow_nan=False).encode("ascii")}
    if pae is not None:
        fields |= {"max_pae": json.dumps(rounded(float(pae.max()), 2)).encode("ascii"), "pae": _matrix(pae)}
    for name, value in (("ptm", ptm), ("iptm", iptm)):
        if value is not None:
            fields[name] = json.dumps(rounded(value, 4)).encode("ascii")
    content = b", ".join(b'"%s": %s' % (name.encode("ascii"), text) for name, text in fields.items())
    return b"{" + content + b"}\n"


def _matrix(pae: np.ndarray) -> bytes:
    """Return a matrix ``[N, N]`` of numbers from 0 as JSON, rounded to two decimals."""
    rows = two_decimals(pae, end=",")
    return b"[[" + b"],[".join(row.tobytes().replace(b"\0", b"")[:-1] for row in rows) + b"]]"


MAX_SCORES_BYTES = 2**26  #: Largest size in bytes of files with scores, settings or coverage

MAX_PAE_BYTES = 2**33  #: Largest file of aligned errors that is read
_LONGEST_NAME = 255
_REMEDY = "remove the file to make the prediction again"


def check_scores(scores: Any) -> dict[str, Any]:
    """Return the parsed content of a scores file, or raise ValueError if a key is missing or has another type."""
    if not isinstance(scores, dict):
        raise ValueError("expected an object")
    kinds = {"name": str, "model": str, "seed": int, "sequences": list, "plddt": list}
    for key, kind in kinds.items():
        if not isinstance(scores.get(key), kind):
            raise ValueError(f"{key} is missing or has another type")
    if len(scores["name"]) > _LONGEST_NAME:
        raise ValueError(f"name is longer than {_LONGEST_NAME} letters")
    sequences, plddt = scores["sequences"], scores["plddt"]
    if not sequences or not all(isinstance(one, str) and one for one in sequences):
        raise ValueError("sequences are not text")
    if len(plddt) != sum(map(len, sequences)) or not all(is_number(one) for one in plddt):
        raise ValueError("plddt is not a number for each residue")
    scored_names(scores)
    residue_numbers(scores)
    return scores


def residue_numbers(scores: Mapping[str, Any]) -> NDArray[np.int32]:
    """Return ``[N]`` residue numbers with the gaps of chains, of the content of a scores file, or raise ValueError."""
    lengths = [len(sequence) for sequence in scores["sequences"]]
    ranges = scores.get("residue_ranges")
    if ranges is None:
        ranges = [[[1, length]] for length in lengths]
    if not isinstance(ranges, list) or len(ranges) != len(lengths):
        raise ValueError("residue_ranges are not given for each chain")
    return np.concatenate([numbers_of_ranges(*one) for one in zip(ranges, lengths, strict=True)])


def residue_labels(names: AuthorNames, protein: Protein) -> list[list[str]] | None:
    """Return the numbers of each chain's residues in files; None if they are those of ``protein.residue_index``."""
    if names.numbers == default_names(protein).numbers:
        return None
    return [list(names.numbers[chain]) for chain in protein.chains]


def scored_names(scores: Mapping[str, Any]) -> AuthorNames:
    """Return the names of chains and residues in the content of a scores file; ValueError for other content."""
    lengths = [len(sequence) for sequence in scores["sequences"]]
    chain_ids = scores.get("chain_ids", [chain_name(number) for number in range(len(lengths))])
    labels = scores.get("residue_labels")
    if not _are_texts(chain_ids, len(lengths)):
        raise ValueError("chain_ids are not given for each chain")
    if labels is None:
        return AuthorNames(tuple(chain_ids), tuple(map(str, residue_numbers(scores).tolist())))
    if (
        not isinstance(labels, list)
        or len(labels) != len(lengths)
        or not all(map(_are_texts, labels, lengths))
    ):
        raise ValueError("residue_labels are not given for each residue")
    numbers = tuple(label for chain in labels for label in chain)
    if wrong := next((label for label in numbers if not re.fullmatch(r"-?\d{1,9}[!-~]?", label)), None):
        raise ValueError(f"residue_labels: expected a number, found {wrong[:20]!r}")
    return AuthorNames(tuple(chain_ids), numbers)


def _are_texts(values: Any, count: int) -> bool:
    is_list = isinstance(values, list) and len(values) == count
    return is_list and all(isinstance(one, str) and 0 < len(one) <= _LONGEST_NAME for one in values)


def read_scores(path: Path) -> dict[str, Any]:
    """Return the content of a ``_scores.json``, with ``ptm`` and ``iptm`` as numbers or None, or raise InputError."""
    check_listed(path)
    scores = read_json_object(path, "names to scores", limit=MAX_SCORES_BYTES)
    try:
        check_scores(scores)
        for key in ("ptm", "iptm"):
            if scores.setdefault(key, None) is not None and not is_number(scores[key]):
                raise ValueError(f"{key} is not a number")
    except ValueError as error:
        raise InputError(f"{error}; {_REMEDY}", path=path) from None
    return scores


def check_pae(content: Any, residues: int) -> tuple[NDArray[np.float32], float]:
    """Return aligned errors ``[N, N]`` of a parsed file, and their upper limit, both in Å, or raise ValueError."""
    try:
        (table,) = content
        pae = np.array(table["predicted_aligned_error"], np.float32)
        largest = float(table["max_predicted_aligned_error"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("it is not an aligned error") from error
    if pae.shape != (residues, residues) or not np.isfinite(pae).all() or not 0 < largest < 1e4:
        raise ValueError(f"it is not the aligned error of {residues} residues")
    return pae, largest


def read_pae(path: Path, residues: int) -> tuple[NDArray[np.float32], float]:
    """Read the aligned errors of a ``_pae.json``, see :func:`check_pae`, or raise InputError."""
    check_listed(path)
    try:
        content = parse_json(read_text_bytes(path, limit=MAX_PAE_BYTES), path, remedy=_REMEDY)
        return check_pae(content, residues)
    except ValueError as error:
        raise InputError(f"{error}; {_REMEDY}", path=path) from None
