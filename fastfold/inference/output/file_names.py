"""Names of a prediction's files: FastFold's, or ColabFold's, which other programs expect.

A file is identified by its ending, for example ``_scores.json``. FastFold appends the ending to target, rank, network
and seed; ColabFold puts the kind of file after the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastfold.data.targets import safe_stem
from fastfold.inference.config import FolderFormat, OutputFormat

ARCHIVE = ".result.zip"  #: Ending of the archive of a target's files
COLABFOLD_SCORES = "_colabfold.json"  #: Ending of ColabFold's scores file; ``_scores.json`` is FastFold's

_KINDS = {"": "unrelaxed", "_colabfold": "scores", "_scores": "fastfold"}
"""ColabFold's words for parts of endings that differ from FastFold's."""

_COLABFOLD = re.compile(
    r"(?P<target>.+)_(?P<kind>unrelaxed|relaxed|scores|fastfold|config|pae|coverage|representations"
    r"|msa(?:_[A-Za-z0-9]+?)?(?:_paired)?)"
    r"_(?P<key>rank_\d{3,9}_alphafold2_.+?)(?:\.(?P<cycle>r\d+))?(?P<suffix>\.(?:a3m|[a-z]+))"
)


def prediction_key(
    network: str, seed: int, output_format: OutputFormat = "fastfold", *, sample: str | None = None
) -> str:
    """Return network, seed and sample as in file names: ``model_1_ptm_seed_0``, ``alphafold2_ptm_model_1_seed_000``."""
    name, tail = safe_stem(network), "" if sample is None else f"_{sample}"
    if output_format == "fastfold":
        return f"{name}_seed_{seed}{tail}"
    name = re.sub(r"(model_\d+)_(ptm|multimer_v\d)", r"\2_\1", name)
    return f"alphafold2_{name}_seed_{seed:03d}{tail}"


def sample_label(sample: Mapping[str, Any]) -> str:
    """Return method and number of a sample in JSON's types as in file names, ``columns_003``."""
    return f"{sample['method']}_{sample['number']:03d}"


def file_name(
    stem: str, rank: int | None, key: str, ending: str, output_format: FolderFormat = "fastfold"
) -> str:
    """Return the name of one of a prediction's files in a style, by the stem of its target and :func:`prediction_key`.

    The rank among the target's predictions is from 1; None for a name without rank, as embeddings have. The ending is
    empty for the common part of the names (FastFold), or for the structure without suffix (ColabFold).
    """
    place = key if rank is None or output_format == "embeddings" else f"rank_{rank:03d}_{key}"
    if output_format != "colabfold":
        return f"{stem}_{place}{ending}"
    word, dot, suffix = ending.partition(".")
    if re.fullmatch(r"_r\d+", word):  # the structure after a pass
        return f"{stem}_unrelaxed_{place}.{word[1:]}{dot}{suffix}"
    return f"{stem}_{_KINDS.get(word, word[1:])}_{place}{dot}{suffix}"


def fastfold_name(name: str) -> str:
    """Convert a ranked file's name from ColabFold's style to FastFold's; return other names unchanged."""
    match = _COLABFOLD.fullmatch(name)
    if match is None:
        return name
    words = {kind: word for word, kind in _KINDS.items()}
    word = f"_{match['cycle']}" if match["cycle"] else words.get(match["kind"], f"_{match['kind']}")
    return f"{match['target']}_{match['key']}{word}{match['suffix']}"


_RANKED = re.compile(r"(?P<target>.+)_rank_(?P<rank>\d{1,9})_.+")


def ranked_target(name: str) -> tuple[str, int] | None:
    """Return the stem of the target and the rank in a file's name of FastFold's style; None without a rank.

    Example:
        >>> from fastfold.inference.output.file_names import ranked_target
        >>> ranked_target("p_rank_1_rank_002_mini_seed_0.cif")
        ('p_rank_1', 2)
    """
    match = _RANKED.fullmatch(name)
    return None if match is None else (match["target"], int(match["rank"]))
