"""Names of a prediction's files: FastFold's own, or ColabFold's, which other programs look for.

A file is known by its ending, ``_scores.json`` for example. In FastFold's names the ending comes last, after target,
rank, network and seed; ColabFold puts the kind of file behind the target.
"""

from __future__ import annotations

import re

from fastfold.data.targets import safe_stem
from fastfold.inference.config import OutputFormat

COLABFOLD_SCORES = "_colabfold.json"
"""Ending of ColabFold's scores file; ``_scores.json`` is FastFold's own."""

_KINDS = {"": "unrelaxed", "_colabfold": "scores", "_scores": "fastfold"}
"""Words of ColabFold for the part of an ending before the suffix; other parts are words already."""

_COLABFOLD = re.compile(
    r"(?P<target>.+)_(?P<kind>unrelaxed|relaxed|scores|fastfold|config|pae|coverage|representations)"
    r"_(?P<key>rank_\d{3,9}_alphafold2_.+?)(?:\.(?P<cycle>r\d+))?(?P<suffix>\.[a-z]+)"
)


def prediction_key(network: str, seed: int, output_format: OutputFormat = "fastfold") -> str:
    """Return network and seed as file names have them.

    Args:
        network: Name of the network.
        seed: The seed.
        output_format: ``fastfold`` for ``model_1_multimer_v3_seed_0``, ``colabfold`` for
            ``alphafold2_multimer_v3_model_1_seed_000``.
    """
    name = safe_stem(network)
    if output_format == "fastfold":
        return f"{name}_seed_{seed}"
    name = re.sub(r"(model_\d+)_(ptm|multimer_v\d)", r"\2_\1", name)
    return f"alphafold2_{name}_seed_{seed:03d}"


def file_name(
    stem: str, rank: int | None, key: str, ending: str, output_format: OutputFormat = "fastfold"
) -> str:
    """Return the name of one of a prediction's files.

    Args:
        stem: Name of the target's files.
        rank: Place among the target's predictions, from 1; None for a name without.
        key: See :func:`prediction_key`.
        ending: Which file; nothing for what the names of its files have in common (FastFold's), or the structure's
            without suffix (ColabFold's).
        output_format: Whose name.
    """
    place = key if rank is None else f"rank_{rank:03d}_{key}"
    if output_format == "fastfold":
        return f"{stem}_{place}{ending}"
    word, dot, suffix = ending.partition(".")
    if re.fullmatch(r"_r\d+", word):  # the structure after a pass
        return f"{stem}_unrelaxed_{place}.{word[1:]}{dot}{suffix}"
    return f"{stem}_{_KINDS.get(word, word[1:])}_{place}{dot}{suffix}"


def fastfold_name(name: str) -> str:
    """Translate a ranked file's name in ColabFold's style to FastFold's; other names stay."""
    found = _COLABFOLD.fullmatch(name)
    if found is None:
        return name
    words = {kind: word for word, kind in _KINDS.items()}
    word = f"_{found['cycle']}" if found["cycle"] else words.get(found["kind"], f"_{found['kind']}")
    return f"{found['target']}_{found['key']}{word}{found['suffix']}"
