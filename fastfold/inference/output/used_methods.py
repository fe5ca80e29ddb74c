"""Methods behind the results in a folder, told by its settings files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastfold.errors import InputError
from fastfold.inference.output.score_files import mapping_of
from fastfold.inference.request import ALIGNMENTS
from fastfold.utils.foreign_text import json_object_or_none

_ENGINES = {
    "msa server": "colabfold",
    "mmseqs": "colabfold",
    "hhblits": "hhsuite",
    "jackhmmer": "hmmer",
    "phmmer": "hmmer",
}
_SAMPLING = {"columns": "afsample2", "clusters": "afcluster", "depth": "subsampling", "dropout": "afsample"}


def used_methods(directory: Path) -> set[str]:
    """Return keys of :data:`~fastfold.protein.citations.CITATIONS` for the results in a folder, or raise InputError.

    Searches are known by the folder ``alignments`` among the results.
    """
    methods: set[str] = set()
    try:
        os.listdir(directory)  # a search by a pattern finds nothing in a folder that cannot be read
    except OSError as error:
        raise InputError(f"cannot be listed: {error.strerror}; check the path", path=directory) from error
    for config in _objects(_in_folders(directory, "*_config*.json")):
        methods.add("alphafold")
        if mapping_of(config, "weights").get("is_multimer") is True:
            methods.add("multimer")
        method = mapping_of(mapping_of(config, "settings"), "sample").get("method")
        methods |= {_SAMPLING[method]} if method in _SAMPLING else set()
    if not methods:
        raise InputError(
            "expected results with ..._config.json, found none; give a folder that fastfold infer wrote to",
            path=directory,
        )
    for record in _objects(directory.glob(f"{ALIGNMENTS}/**/search.json")):
        for entry in record.values():
            engine = mapping_of(entry, "settings").get("engine")
            methods |= {_ENGINES[engine]} if engine in _ENGINES else set()
    if any(_in_folders(directory, "*_relaxed*")):
        methods.add("openmm")
    return methods


def _in_folders(directory: Path, pattern: str) -> Iterator[Path]:
    yield from directory.glob(pattern)
    yield from directory.glob(f"*/{pattern}")


def _objects(paths: Iterator[Path]) -> Iterator[dict[str, Any]]:
    return (content for path in paths if (content := json_object_or_none(path)) is not None)
