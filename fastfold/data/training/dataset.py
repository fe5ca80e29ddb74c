"""What is trained on: a list of chains with their structure files and alignments, found in a folder.

Two layouts are known. *OpenFold*: ``mmcifs/<id>.cif``, ``alignments/<id>_<chain>/*.a3m|*.sto`` and
``chain_data_cache.json``, which OpenFold's scripts write. *Folder*: structure files, ``msas/<name>.a3m``, and an
optional ``index.tsv``. Structures are PDB or mmCIF, everything may end in ``.gz``. What the tables do not
tell (a chain's sequence, for example) is read from the structure itself.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from fastfold.data.msa.database import AlignmentDatabase
from fastfold.data.training.entry import EXPERIMENTAL, Entry, alignment_depth, resolved_share, select_chain
from fastfold.data.training.index_tables import (
    ChainRecord,
    read_chain_data_cache,
    read_duplicates,
    read_index,
)
from fastfold.errors import ConfigError, InputError
from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import ChainStructure
from fastfold.utils.text_files import FileSlice, PathLike

WHOLE_SPLIT = "train"
"""A folder without splits is all of this one."""

_STRUCTURE_ENDINGS = (".pdb", ".ent", ".cif", ".mmcif")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Dataset(Sequence[Entry]):
    """Entries, sorted by name.

    Attributes:
        entries: The chains.
        unreadable: Names and reasons of structures that were found but cannot be used.
    """

    entries: tuple[Entry, ...]
    unreadable: tuple[tuple[str, str], ...] = field(default=())

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, index: int | slice) -> Entry | tuple[Entry, ...]:
        return self.entries[index]


def open_dataset(
    directory: PathLike,
    *,
    layout: str = "folder",
    split: str | None = None,
    source: str = EXPERIMENTAL,
    oversample: Mapping[str, float] | None = None,
    depth_weights: Mapping[int, float] | None = None,
    alignments: PathLike | None = None,
    duplicates: PathLike | None = None,
) -> Dataset:
    """Finds the chains in a folder.

    Args:
        directory: The folder; or a single structure file, whose chains are all there is.
        layout: ``folder`` or ``openfold``.
        split: Take this split alone: a value of the column ``split`` of ``index.tsv``, or a sub-folder. A
            folder without splits is all of split ``train``.
        source: ``experimental``, or ``distillation`` for predicted structures with pLDDT as B-factors.
        oversample: Factors of the sampling weight by name: an entry's whole name, or its beginning up to a
            ``_`` (``1ten`` for ``1ten_A``).
        depth_weights: Factors of the sampling weight by alignment depth: number of rows to the factor of chains that
            have as many or more (up to the next number).
        alignments: Folder of alignments, or the index of an alignment database
            (:class:`fastfold.data.msa.database.AlignmentDatabase`); by default the folder that belongs to the layout.
        duplicates: Layout ``openfold``: table of chains that share the alignments of one
            (:func:`fastfold.data.training.index_tables.read_duplicates`); by default ``duplicate_pdb_chains.txt`` of
            the folder, if there is one.

    Raises:
        ConfigError: The folder, or one of the others, does not exist or holds nothing to train on, the split does not
            exist, or a name to oversample is not there.
        InputError: A table cannot be read.
    """
    root = Path(directory)
    if not root.exists():
        raise ConfigError(f"the data folder {str(root)!r} does not exist; set data.directory")
    if layout not in _EXPECTED:
        raise ConfigError(f"layout {layout!r} is not known; it is one of {', '.join(_EXPECTED)}")
    if duplicates is not None and layout != "openfold":
        raise ConfigError("data.duplicates belongs to data.layout=openfold; leave it out, or set the layout")
    given = _open_alignments(alignments)
    try:
        if not root.is_dir():
            found = _from_file(root, given)
        elif layout == "folder":
            found = _from_folder(root, split, given)
        else:
            found = _from_openfold(root, split, given, duplicates)
        entries, unreadable = _complete(found)
    except OSError as error:
        raise ConfigError(f"the data folder {str(root)!r} cannot be searched: {error}") from None
    if not entries:
        first = "".join(f"\n  {name}: {reason}" for name, reason in unreadable[:3])
        raise ConfigError(
            f"there is no structure to train on in {str(root)!r} (layout {layout}, split {split})"
            + (f"; {len(unreadable)} cannot be used:{first}" if unreadable else f"; {_EXPECTED[layout]}")
        )
    sizes = Counter(entry.cluster for entry in entries if entry.cluster)
    entries = [
        replace(entry, source=source, cluster_size=sizes.get(entry.cluster, entry.cluster_size))
        for entry in entries
    ]
    entries = _oversampled(entries, oversample or {})
    return Dataset(tuple(_by_depth(entries, depth_weights or {})), tuple(unreadable))


# ---- layouts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A structure file, and what a table says about the chain in it."""

    id: str
    structure: Path | None
    alignment_dir: Path | None
    record: ChainRecord
    alignment_name: str = ""
    database: AlignmentDatabase | None = None

    def files(self, name: str) -> tuple[FileSlice, ...] | None:
        """Files that the database has for a chain in it; None without a database, or if it has none."""
        return None if self.database is None else self.database.get(self.alignment_name or name)


_Alignments = Path | AlignmentDatabase | None
"""Where alignments lie, if the user says it."""


def _open_alignments(path: PathLike | None) -> _Alignments:
    if path is None:
        return None
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            f"the alignments {str(path)!r} do not exist; data.alignments names a folder, or the index of a database"
        )
    return path if path.is_dir() else AlignmentDatabase(path)


def _placed(found: _Found, alignments: _Alignments) -> _Found:
    """What was found, with its alignments from where the user says they are."""
    if isinstance(alignments, AlignmentDatabase):
        return replace(found, alignment_dir=None, database=alignments)
    return found if alignments is None else replace(found, alignment_dir=alignments)


_EXPECTED = {
    "folder": "expected are files *.pdb, *.cif (or with .gz after it), there or in a sub-folder of the split's name",
    "openfold": "expected are mmcifs/<id>.cif and alignments/<id>_<chain>/",
}


def _from_file(path: Path, alignments: _Alignments) -> Iterator[_Found]:
    """The chains of one file, with alignments in a folder ``msas`` next to it."""
    name = os.path.splitext(path.name.removesuffix(".gz"))[0]
    yield _placed(_Found(name, path, _folder_or_none(path.parent / "msas"), ChainRecord()), alignments)


def _from_folder(root: Path, split: str | None, alignments: _Alignments) -> Iterator[_Found]:
    """Chains of a plain folder, by its index or else by its files."""
    msas = _folder_or_none(root / "msas")
    index = root / "index.tsv"
    if index.is_file():
        records = read_index(index)
        splits = sorted({record.split for record in records.values()} - {""})
        wanted = _check_split(root, split, splits)
        files: dict[str, dict[str, Path]] = {}
        for name, record in records.items():
            if wanted is None or record.split == wanted:
                if record.split not in files:
                    files[record.split] = _structure_files(root) | _structure_files(root / record.split)
                yield _placed(_Found(name, files[record.split].get(name), msas, record), alignments)
        return
    wanted = _check_split(root, split, [name for name in (split,) if name and (root / name).is_dir()])
    for name, path in sorted(_structure_files(root / wanted if wanted else root).items()):
        yield _placed(_Found(name, path, msas, ChainRecord()), alignments)


def _from_openfold(
    root: Path, split: str | None, given: _Alignments, duplicates: PathLike | None
) -> Iterator[_Found]:
    """Chains that have alignments and their duplicates, or all of ``chain_data_cache.json`` where there are none."""
    wanted = _check_split(
        root, split, [name for name in (split,) if name and (root / name / "mmcifs").is_dir()]
    )
    base = root / wanted if wanted else root
    if not (base / "mmcifs").is_dir():
        raise ConfigError(f"the folder {str(base)!r} has no folder 'mmcifs'; {_EXPECTED['openfold']}")
    files = _structure_files(base / "mmcifs")
    cache = base / "chain_data_cache.json"
    records = read_chain_data_cache(cache) if cache.is_file() else {}
    alignments = _folder_or_none(base / "alignments") if given is None else given
    if isinstance(alignments, AlignmentDatabase):
        names = dict.fromkeys(alignments, "")
    elif alignments is not None:
        names = {path.name: "" for path in alignments.iterdir() if path.is_dir()}
    else:
        names = dict.fromkeys(records, "")
    table = base / "duplicate_pdb_chains.txt" if duplicates is None else Path(duplicates)
    if duplicates is not None and not table.is_file():
        raise ConfigError(f"the table of duplicates {str(table)!r} does not exist; correct data.duplicates")
    if table.is_file():
        names |= _duplicates(read_duplicates(table), names)
    for name, shared in sorted(names.items()):
        # A predicted structure is one chain, named as its file.
        stem, _, chain_id = (name, "", "") if name in files else name.rpartition("_")
        record = replace(records.get(name, ChainRecord()), chain_id=chain_id)
        folder = alignments if isinstance(alignments, Path) else None
        yield _placed(_Found(name, files.get(stem), folder, record, alignment_name=shared), alignments)


def _duplicates(groups: Sequence[Sequence[str]], names: Mapping[str, str]) -> dict[str, str]:
    """For each chain without alignments the first of its group that has some; groups without any have no chains."""
    found: dict[str, str] = {}
    for group in groups:
        first = next((name for name in group if name in names), None)
        if first is not None:
            found |= {name: first for name in group if name not in names}
    return found


def _check_split(root: Path, split: str | None, there: Sequence[str]) -> str | None:
    """The split to select, or None for everything."""
    if split is None or (split == WHOLE_SPLIT and not there):
        return None
    if split not in there:
        known = f"it has {', '.join(there)}" if there else "it has no splits"
        raise ConfigError(
            f"the data folder {str(root)!r} has no split {split!r}: {known}; choose one, or null"
        )
    return split


def _folder_or_none(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _structure_files(folder: Path) -> dict[str, Path]:
    """Structure files of a folder by name without endings; plain ones before packed ones."""
    files: dict[str, Path] = {}
    if folder.is_dir():
        # A pipe would be waited for.
        for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_file()):
            stem, ending = os.path.splitext(name.removesuffix(".gz"))
            if ending.lower() in _STRUCTURE_ENDINGS and not name.startswith("."):
                files.setdefault(stem, folder / name)
    return files


def _complete(found: Iterator[_Found]) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Entries of all chains found; where no table has the sequence, the structure is read."""
    entries: list[Entry] = []
    unreadable: list[tuple[str, str]] = []
    num_read = 0
    for item in found:
        if item.structure is None:
            unreadable.append((item.id, "there is no structure file of that name"))
        elif item.record.sequence:
            entries.append(_entry(item, item.structure))
        else:
            num_read += 1
            try:
                entries += _entries_from_file(item, item.structure)
            except InputError as error:
                unreadable.append((item.id, str(error)))
    if num_read > 1000:
        _log.info(
            "%d structures had to be read for their sequences; a table of them would spare that", num_read
        )
    if unreadable:
        _log.warning("%d structures cannot be used; the first is %s: %s", len(unreadable), *unreadable[0])
    return sorted(entries, key=lambda entry: entry.id), unreadable


def _entry(item: _Found, structure: Path, **changes: Any) -> Entry:
    record = item.record
    values: dict[str, Any] = {
        "id": item.id,
        "sequence": record.sequence,
        "chain_id": record.chain_id or None,
        "cluster": record.cluster,
        "cluster_size": record.cluster_size,
        "resolution": record.resolution,
        "release_date": record.release_date,
        "msa_rows": record.msa_rows,
    }
    values |= changes
    return Entry(
        structure=structure,
        alignment_dir=item.alignment_dir,
        alignment_name=item.alignment_name,
        alignment_files=item.files(values["id"]),
        **values,
    )


def _entries_from_file(item: _Found, path: Path) -> list[Entry]:
    """One entry per chain of a file, or the one that is named."""
    structure = read_structure(path)
    chains: Sequence[ChainStructure] = structure.chains
    if item.record.chain_id:
        chains = [select_chain(structure, _entry(item, path))]
    return [
        _entry(
            item,
            path,
            id=item.id if len(chains) == 1 else f"{item.id}_{chain.chain_id}",
            sequence=chain.sequence,
            chain_id=chain.chain_id,
            resolution=structure.resolution if item.record.resolution is None else item.record.resolution,
            release_date=item.record.release_date or structure.release_date,
            resolved=resolved_share(chain),
        )
        for chain in chains
    ]


def _oversampled(entries: list[Entry], factors: Mapping[str, float]) -> list[Entry]:
    weights = np.ones(len(entries))
    for name, factor in factors.items():
        if not factor > 0 or not np.isfinite(factor):
            raise ConfigError(f"the factor of oversample {name!r} must be positive, but is {factor}")
        chosen = [entry.id == name or entry.id.startswith(f"{name}_") for entry in entries]
        if not any(chosen):
            names = {entry.id for entry in entries} | {entry.id.partition("_")[0] for entry in entries}
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"oversample names {name!r}, which is not in the training set{hint}")
        weights[chosen] *= factor
    return [replace(entry, weight=float(w)) for entry, w in zip(entries, weights, strict=True)]


def _by_depth(entries: list[Entry], factors: Mapping[int, float]) -> list[Entry]:
    """Entries weighted by the depth of their alignments; unreadable alignments are found out when they are drawn."""
    if not factors:
        return entries
    for rows, factor in factors.items():
        if rows < 0 or not 0 < factor < np.inf:
            raise ConfigError(
                f"depth_weights must map numbers of rows to positive factors, not {rows} to {factor}"
            )
    starts = sorted(factors)
    weighted = []
    for entry in entries:
        try:
            depth = alignment_depth(entry)
        except InputError:
            depth = 0
        reached = [start for start in starts if start <= depth]
        weighted.append(replace(entry, weight=entry.weight * factors[reached[-1]]) if reached else entry)
    return weighted
