"""Inputs of AlphaFold 3 and Boltz: JSON and YAML files that list the molecules of one complex.

Files with only protein chains are read. Ligands, nucleic acids, modified residues, bonds, constraints and templates are
refused, because a fold without them would answer another question.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fastfold.data.queries.records import QueryFile, Record
from fastfold.data.targets import parse_sequence
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, split_lines

ENTITY_ENDINGS = (".json", ".yaml", ".yml")

_PROTEINS = ("protein", "proteinChain")
_MEANINGFUL = ("bondedAtomPairs", "userCCD", "userCCDPath", "constraints", "templates", "properties")
"""Keys that change the meaning of a file."""
_OF_CHAIN = ("modifications", "templates", "cyclic", "glycans")
_ALIGNMENTS = ("msa", "unpairedMsa", "pairedMsa", "unpairedMsaPath", "pairedMsaPath")
_MAX_COPIES = 1000


def parse_entities(file: QueryFile) -> Iterator[Record | InputError]:
    """Parse the complexes of a JSON or YAML file of AlphaFold 3, its server, or Boltz.

    Yields:
        Each complex, or its error: one in most files, several in those of AlphaFold's server.

    Raises:
        InputError: The content is neither JSON nor YAML, or not such an input.
    """
    tree = _parsed(file)
    jobs = tree if isinstance(tree, list) else [tree]
    if not jobs:
        raise InputError("the list contains no complex; add one", path=file.path)
    for number, job in enumerate(jobs, 1):
        if not isinstance(job, Mapping) or not isinstance(job.get("sequences"), list) or not job["sequences"]:
            raise InputError(
                "expected an input of AlphaFold 3 or Boltz with a list 'sequences', found other content; FASTA files "
                "end in .fasta, tables in .csv",
                path=file.path,
            )
        given = str(job.get("name") or "").strip()
        name = given or file.stem + (f"_{number}" if len(jobs) > 1 else "")
        try:
            yield _record(job, name, file.path)._replace(is_named=bool(given))
        except InputError as error:
            yield error


def _parsed(file: QueryFile) -> Any:
    try:
        text = file.data.decode("utf-8-sig")
        if Path(str(file.path).removesuffix(".gz")).suffix.lower() == ".json":
            return json.loads(text)
        return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"cannot be read: {message}; check the file's syntax", path=file.path) from None


def _record(job: Mapping[str, Any], name: str, path: PathLike) -> Record:
    fail = partial(InputError, path=path, record=name)
    _refuse(job, _MEANINGFUL, fail)
    sequences: list[str] = []
    chains: list[str] = []
    warnings = []
    if job.get("modelSeeds"):
        warnings.append("the seeds of the file are ignored; give them with --seeds")
    for number, entity in enumerate(job["sequences"], 1):
        content = _protein(entity, number, fail)
        (sequence, *more), doubts = parse_sequence(split_lines(content["sequence"]), path=path, record=name)
        if more:
            raise fail(f"entry {number} has ':' in its sequence; list each chain")
        if any(content.get(key) not in (None, "", "empty") for key in _ALIGNMENTS):
            doubts.append("alignments named in the file are ignored; give them with --msa-dir")
        names = _copies(content, number, fail)
        sequences += [sequence] * len(names)
        chains += names
        warnings += [doubt for doubt in doubts if doubt not in warnings]
    return Record(name, 1, sequences, warnings, chains)


def _protein(entity: Any, number: int, fail: Callable[[str], InputError]) -> Mapping[str, Any]:
    """Return the content of an entity that is a protein."""
    if not isinstance(entity, Mapping) or len(entity) != 1:
        raise fail(f"entry {number} of 'sequences' must have a single kind of molecule")
    ((kind, content),) = entity.items()
    if kind not in _PROTEINS:
        raise fail(
            f"expected only proteins, found {str(kind)[:40]!r} as entry {number}; FastFold folds proteins: remove it "
            "from the file"
        )
    if not isinstance(content, Mapping) or not isinstance(content.get("sequence"), str):
        raise fail(f"entry {number} lacks a text 'sequence'")
    _refuse(content, _OF_CHAIN, fail)
    return content


def _copies(content: Mapping[str, Any], number: int, fail: Callable[[str], InputError]) -> list[str]:
    """Return the name of each copy of a protein, empty for copies without names."""
    given = content.get("id", content.get("count", 1))
    count = given if isinstance(given, int) else len(given) if isinstance(given, list) else 1
    if not 1 <= count <= _MAX_COPIES:
        raise fail(f"entry {number} has {count} copies, expected 1 to {_MAX_COPIES}")
    if isinstance(given, list):
        return [str(copy) for copy in given]
    return [""] * count if isinstance(given, int) else [str(given)]


def _refuse(content: Mapping[str, Any], keys: tuple[str, ...], fail: Callable[[str], InputError]) -> None:
    for key in keys:
        if content.get(key):
            raise fail(
                f"has {key!r}, which FastFold does not support in such files; remove it to fold only the chains"
            )
