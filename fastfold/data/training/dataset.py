"""Find the chains of a training set, with structure files and alignments, in a folder.

There are two layouts. *OpenFold*: ``mmcifs/<id>.cif``, ``alignments/<id>_<chain>/*.a3m|*.sto`` and
``chain_data_cache.json``, written by OpenFold's scripts. *Folder*: structure files, ``msas/<name>.a3m``, and an
optional ``index.tsv``. Structures are PDB or mmCIF; all files may end in ``.gz``. Data that are missing in the tables
(such as a chain's sequence) are read from the structure.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from fastfold.data.training.entry import EXPERIMENTAL, Entry, alignment_depth, resolved_share, select_chain
from fastfold.data.training.index_tables import (
    AlignmentDatabase,
    ChainRecord,
    read_chain_data_cache,
    read_duplicates,
    read_index,
)
from fastfold.errors import ConfigError, InputError, suggest
from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import ChainStructure
from fastfold.utils.option_fields import check_path
from fastfold.utils.text_files import FileSlice, PathLike

WHOLE_SPLIT = "train"  #: Split of a folder without splits

_STRUCTURE_ENDINGS = (".pdb", ".ent", ".cif", ".mmcif")
_OF_RECORD = ("sequence", "cluster", "cluster_size", "resolution", "release_date", "msa_rows")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Dataset(Sequence[Entry]):
    """Entries, sorted by name."""

    entries: tuple[Entry, ...]  #: The chains
    unreadable: tuple[tuple[str, str], ...] = field(default=())  #: Names and reasons of invalid structures

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, index: int | slice) -> Entry | tuple[Entry, ...]:
        return self.entries[index]


def check_directory(directory: PathLike) -> Path:
    """Return the path of a training set, or raise ConfigError if nothing is there."""
    check_path(directory)
    root = Path(directory)
    if not root.exists():
        raise ConfigError(f"the data folder {str(root)!r} does not exist; set data.directory")
    return root


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
    """Find the chains of a folder.

    Args:
        directory: The folder; or a single structure file with all chains of the set.
        layout: ``folder`` or ``openfold``.
        split: Split to use: a value of the column ``split`` of ``index.tsv``, or a sub-folder. A folder without splits
            belongs to split ``train``.
        source: ``experimental``, or ``distillation`` for predicted structures with pLDDT as B-factors.
        oversample: Factors of the sampling weight by name: an entry's whole name, or its part before a ``_`` (``1ten``
            for ``1ten_A``).
        depth_weights: Factors of the sampling weight by alignment depth: a number of rows, with the factor of chains
            with at least that many (up to the next number).
        alignments: Folder of alignments, or index of an alignment database
            (:class:`fastfold.data.training.index_tables.AlignmentDatabase`); None for the layout's own folder.
        duplicates: For layout ``openfold``: table of chains that share alignments
            (:func:`fastfold.data.training.index_tables.read_duplicates`); None for ``duplicate_pdb_chains.txt`` of the
            folder, if it exists.

    Raises:
        ConfigError: The folder, or another path, does not exist or contains no chain to train on; the split does not
            exist; or a name in ``oversample`` is unknown.
        InputError: A table cannot be read.

    Example:
        >>> from pathlib import Path
        >>> import fastfold
        >>> _ = Path("1abc.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> [(entry.id, entry.chain_id, entry.sequence) for entry in fastfold.data.open_dataset("1abc.pdb")]
        [('1abc', 'A', 'MTYKLILNGK')]
    """
    root = check_directory(directory)
    if layout not in _EXPECTED:
        raise ConfigError(f"unknown layout {layout!r}; expected one of {', '.join(_EXPECTED)}")
    if duplicates is not None and layout != "openfold":
        raise ConfigError("data.duplicates belongs to data.layout=openfold; leave it out, or set the layout")
    alignment_source = _open_alignments(alignments)
    try:
        if not root.is_dir():
            chains = _from_file(root, alignment_source)
        elif layout == "folder":
            chains = _from_folder(root, split, alignment_source)
        else:
            chains = _from_openfold(root, split, alignment_source, duplicates)
        entries, unreadable = _complete(chains)
    except OSError as error:
        raise ConfigError(f"the data folder {str(root)!r} cannot be searched: {error}") from None
    if not entries:
        first = "".join(f"\n  {name}: {reason}" for name, reason in unreadable[:3])
        raise ConfigError(
            f"{str(root)!r} contains no structure to train on (layout {layout}, split {split})"
            + (f"; {len(unreadable)} are invalid:{first}" if unreadable else f"; {_EXPECTED[layout]}")
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
    """Structure file, with a table's data about the chain in it."""

    id: str
    structure: Path | None
    alignment_dir: Path | None
    record: ChainRecord
    alignment_name: str = ""
    database: AlignmentDatabase | None = None

    def files(self, name: str) -> tuple[FileSlice, ...] | None:
        """Return the database's files of a chain; None without a database or files."""
        return None if self.database is None else self.database.get(self.alignment_name or name)


_Alignments = Path | AlignmentDatabase | None  #: Alignments in a place given by the user


def _open_alignments(path: PathLike | None) -> _Alignments:
    if path is None:
        return None
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            f"the alignments {str(path)!r} do not exist; data.alignments names a folder, or the index of a database"
        )
    return path if path.is_dir() else AlignmentDatabase(path)


def _placed(chain: _Found, alignments: _Alignments) -> _Found:
    """Add the alignments from the place given by the user."""
    if isinstance(alignments, AlignmentDatabase):
        return replace(chain, alignment_dir=None, database=alignments)
    return chain if alignments is None else replace(chain, alignment_dir=alignments)


_EXPECTED = {
    "folder": "expected files *.pdb, *.cif (or with .gz after it), there or in a sub-folder of the split's name",
    "openfold": "expected mmcifs/<id>.cif and alignments/<id>_<chain>/",
}


def _from_file(path: Path, alignments: _Alignments) -> Iterator[_Found]:
    """Yield the chains of one file, with alignments in a folder ``msas`` next to it."""
    name = os.path.splitext(path.name.removesuffix(".gz"))[0]
    yield _placed(_Found(name, path, _folder_or_none(path.parent / "msas"), ChainRecord()), alignments)


def _from_folder(root: Path, split: str | None, alignments: _Alignments) -> Iterator[_Found]:
    """Yield the chains of a plain folder, from its index or its files."""
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
    root: Path, split: str | None, source: _Alignments, duplicates: PathLike | None
) -> Iterator[_Found]:
    """Yield chains with alignments and their duplicates, or all of ``chain_data_cache.json`` without any."""
    wanted = _check_split(
        root, split, [name for name in (split,) if name and (root / name / "mmcifs").is_dir()]
    )
    base = root / wanted if wanted else root
    if not (base / "mmcifs").is_dir():
        raise ConfigError(f"the folder {str(base)!r} lacks a folder 'mmcifs'; {_EXPECTED['openfold']}")
    files = _structure_files(base / "mmcifs")
    cache = base / "chain_data_cache.json"
    records = read_chain_data_cache(cache) if cache.is_file() else {}
    alignments = _folder_or_none(base / "alignments") if source is None else source
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
        # A predicted structure is one chain with the name of its file.
        stem, _, chain_id = (name, "", "") if name in files else name.rpartition("_")
        record = replace(records.get(name, ChainRecord()), chain_id=chain_id)
        folder = alignments if isinstance(alignments, Path) else None
        yield _placed(_Found(name, files.get(stem), folder, record, alignment_name=shared), alignments)


def _duplicates(groups: Sequence[Sequence[str]], names: Mapping[str, str]) -> dict[str, str]:
    """Map each chain without alignments to the first of its group that has some, if any."""
    first_of: dict[str, str] = {}
    for group in groups:
        first = next((name for name in group if name in names), None)
        if first is not None:
            first_of |= {name: first for name in group if name not in names}
    return first_of


def _check_split(root: Path, split: str | None, there: Sequence[str]) -> str | None:
    """Return the split to select, or None for all."""
    if split is None or (split == WHOLE_SPLIT and not there):
        return None
    if split not in there:
        known = f"it has {', '.join(there)}" if there else "it has no splits"
        raise ConfigError(
            f"the data folder {str(root)!r} lacks the split {split!r}: {known}; choose one as data.train_split or "
            "data.valid_split (null: no validation)"
        )
    return split


def _folder_or_none(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _structure_files(folder: Path) -> dict[str, Path]:
    """Return the structure files of a folder by name without suffixes, plain ones before compressed ones."""
    files: dict[str, Path] = {}
    if folder.is_dir():
        # Opening a pipe would block.
        for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_file()):
            stem, ending = os.path.splitext(name.removesuffix(".gz"))
            if ending.lower() in _STRUCTURE_ENDINGS and not name.startswith("."):
                files.setdefault(stem, folder / name)
    return files


def _complete(chains: Iterator[_Found]) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Return entries of all chains; a structure is read if no table has its sequence."""
    entries: list[Entry] = []
    unreadable: list[tuple[str, str]] = []
    num_read = 0
    for item in chains:
        if item.structure is None:
            unreadable.append((item.id, "the structure file of that name is missing"))
        elif item.record.sequence:
            entries.append(_entry(item, item.structure))
        else:
            num_read += 1
            try:
                entries += _entries_from_file(item, item.structure)
            except InputError as error:
                unreadable.append((item.id, str(error)))
    if num_read > 1000:
        _log.info("%d structures had to be read for their sequences; a table would avoid that", num_read)
    if unreadable:
        _log.warning("%d structures are invalid; the first is %s: %s", len(unreadable), *unreadable[0])
    return sorted(entries, key=lambda entry: entry.id), unreadable


def _entry(item: _Found, structure: Path, **changes: Any) -> Entry:
    values = {name: getattr(item.record, name) for name in _OF_RECORD}
    values |= {"id": item.id, "chain_id": item.record.chain_id or None, **changes}
    return Entry(
        structure=structure,
        alignment_dir=item.alignment_dir,
        alignment_name=item.alignment_name,
        alignment_files=item.files(values["id"]),
        **values,
    )


def _entries_from_file(item: _Found, path: Path) -> list[Entry]:
    """Return one entry per chain of a file, or that of the named chain."""
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
            raise ConfigError(f"the factor of oversample {name!r} must be positive, found {factor}")
        chosen = [entry.id == name or entry.id.startswith(f"{name}_") for entry in entries]
        if not any(chosen):
            names = {entry.id for entry in entries} | {entry.id.partition("_")[0] for entry in entries}
            raise ConfigError(
                f"oversample names {name!r}, which is not in the training set; {suggest(name, names)}"
            )
        weights[chosen] *= factor
    return [replace(entry, weight=float(w)) for entry, w in zip(entries, weights, strict=True)]


def _by_depth(entries: list[Entry], factors: Mapping[int, float]) -> list[Entry]:
    """Weight entries by the depth of their alignments; invalid alignments are reported when they are drawn."""
    if not factors:
        return entries
    for rows, factor in factors.items():
        if rows < 0 or not 0 < factor < np.inf:
            raise ConfigError(
                f"depth_weights must map numbers of rows to positive factors, found {rows}: {factor}"
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
