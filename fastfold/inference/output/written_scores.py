"""Read scores and aligned errors from a results folder of any origin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastfold.errors import InputError
from fastfold.inference.output.json_files import is_number
from fastfold.protein.labels import numbers_of_ranges
from fastfold.utils.text_files import check_listed, read_json_object, read_text_bytes

MAX_SCORES_BYTES = 2**26  #: Largest size in bytes of files with scores, settings or coverage

_MAX_PAE_BYTES = 2**33
_LONGEST_NAME = 255
_REMEDY = "remove the file to make the prediction again"


def check_scores(scores: Any) -> dict[str, Any]:
    """Return the parsed content of a scores file after checking its required keys.

    Raises:
        ValueError: A key is missing, or its value has another type.
    """
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
    residue_numbers(scores)
    return scores


def residue_numbers(scores: Mapping[str, Any]) -> NDArray[np.int32]:
    """Return ``[N]`` residue numbers in the whole proteins, of the content of a scores file.

    Raises:
        ValueError: The file's residue ranges do not fit its sequences.
    """
    lengths = [len(sequence) for sequence in scores["sequences"]]
    ranges = scores.get("residue_ranges")
    if ranges is None:
        ranges = [[[1, length]] for length in lengths]
    if not isinstance(ranges, list) or len(ranges) != len(lengths):
        raise ValueError("residue_ranges are not given for each chain")
    return np.concatenate([numbers_of_ranges(*one) for one in zip(ranges, lengths, strict=True)])


def read_scores(path: Path) -> dict[str, Any]:
    """Return the content of a prediction's ``_scores.json``; ``ptm`` and ``iptm`` are numbers or None.

    Raises:
        InputError: The file cannot be read, or is not a scores file.
    """
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


def check_pae(found: Any, residues: int) -> tuple[NDArray[np.float32], float]:
    """Return aligned errors ``[N, N]`` of a parsed file, and their limit, both in Å.

    The file has the format of AlphaFold DB. The limit is the largest error that the network can predict.

    Raises:
        ValueError: The content is not an aligned error of this number of residues.
    """
    try:
        (table,) = found
        pae = np.array(table["predicted_aligned_error"], np.float32)
        largest = float(table["max_predicted_aligned_error"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("it is not an aligned error") from error
    if pae.shape != (residues, residues) or not np.isfinite(pae).all() or not 0 < largest < 1e4:
        raise ValueError(f"it is not the aligned error of {residues} residues")
    return pae, largest


def read_pae(path: Path, residues: int) -> tuple[NDArray[np.float32], float]:
    """Read the aligned errors of a ``_pae.json``, see :func:`check_pae`.

    Raises:
        InputError: The file cannot be read, or does not hold the errors of this number of residues.
    """
    check_listed(path)
    try:
        return check_pae(json.loads(read_text_bytes(path, limit=_MAX_PAE_BYTES)), residues)
    except RecursionError:
        raise InputError(f"is nested too deeply; {_REMEDY}", path=path) from None
    except ValueError as error:
        raise InputError(f"{error}; {_REMEDY}", path=path) from None
