"""Check of a program's archive before PyTorch reads it, so that a foreign file runs no code.

``torch.export.load`` falls back to the full unpickler, loads libraries that are in the archive, and evaluates
expressions and operator names of the graph. A program of :func:`fastfold.export` needs none of these.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from fastfold.errors import InputError, WeightsError, first_line
from fastfold.evoformer.weights.untrusted import open_archive
from fastfold.utils.foreign_text import parse_json, shown

ABOUT: Final = "fastfold.json"  #: Name of our description in the archive

_GRAPH = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_TABLES = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_MEMBERS = re.compile(
    r"\.data/(serialization_id|version)|archive_format|archive_version|byteorder|version|"
    rf"data/(constants/tensor|weights/weight)_\d+|extra/{re.escape(ABOUT)}|"
    + "|".join(map(re.escape, (_GRAPH, _SAMPLES, *_TABLES)))
)
"""Members of a program, without the name of their common folder."""

_OPERATORS = "torch.ops.aten."
_EVALUATED = ("as_expr", "expr_str", "as_operator", "as_custom_obj", "as_graph")
"""Keys of a graph whose values PyTorch evaluates or looks up by name."""

_FIXED = (
    *("sym_int_values", "sym_float_values", "sym_bool_values", "custom_obj_values", "range_constraints"),
    "guards_code",
)
"""Entries of a graph that are empty in a program of fixed sizes."""


def check_program(path: Path) -> None:
    """Check that a program holds tensors and operators of ATen alone.

    Raises:
        InputError: The file is not an archive of ``torch.export``, or has a member, a pickle, an expression or an
            operator that :func:`fastfold.export` does not write.
    """
    try:
        with open_archive(path) as archive:
            problem = _problem(archive)
    except WeightsError as error:
        raise InputError(str(error).removeprefix(f"{path}: "), path=path) from None
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise InputError(f"is damaged ({first_line(error)}); copy it again", path=path) from None
    if problem:
        raise InputError(f"is not a program of fastfold.export: {problem}", path=path)


def _problem(archive: zipfile.ZipFile) -> str:
    """Return the first thing that a program does not have, empty for a program."""
    names = archive.namelist()
    folder = names[0].partition("/")[0] + "/"
    for name in names:
        if not (name.startswith(folder) and _MEMBERS.fullmatch(name.removeprefix(folder))):
            return f"it has the member {shown(name)}"
    missing = [name for name in (f"extra/{ABOUT}", _GRAPH, _SAMPLES, *_TABLES) if folder + name not in names]
    if missing:
        return f"it has no entry {missing[0]}"
    for name in _TABLES:
        if any(key == "use_pickle" and value for key, value in _entries(_json(archive, folder + name))):
            return f"{name} names a pickle"
    graph = _json(archive, folder + _GRAPH)
    for key, value in _entries(graph):
        if key in _EVALUATED or (key in _FIXED and value):
            return f"its graph has {key}"
        if key == "target" and not (isinstance(value, str) and value.startswith(_OPERATORS)):
            return f"its graph has the operator {shown(value)}"
    try:
        torch.load(io.BytesIO(archive.read(folder + _SAMPLES)), weights_only=True)
    except Exception:  # objects in a damaged file may raise any error
        return f"{_SAMPLES} is not a pickle of tensors alone"
    return ""


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    return parse_json(archive.read(name), f"{archive.filename}: {name}", remedy="export the program again")


def _entries(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of the objects in a tree with its value."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield from node.items()
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
