"""Read alignment files by their extension, and find those of a target by its name.

The alignments of a target ``ID`` are at these places, in order of preference (:mod:`fastfold.data.msa.choose`):

- one chain: ``ID.a3m``, ``ID.sto``, or a folder ``ID/`` or ``ID/msas/`` (AlphaFold) of alignments; then the places of
  the chain's FASTA record, if the target has another name; then ``ID/msas/A/`` (AlphaFold-Multimer);
- chain ``A`` of a complex: ``ID/A.a3m``, ``ID/A/``, ``ID/msas/A/`` (AlphaFold-Multimer), ``ID_A.a3m``, ``ID_A/``
  (OpenFold), or the places of the chain's FASTA record, of a record of several chains those of its chain;
- a whole complex: the places of one chain, with an alignment for its only sequence, or ColabFold's alignment of all
  chains; ``colabfold_pairs.a3m`` in such a folder has rows that pair the chains alone.

In place of ``ID.a3m`` there may be a table of Boltz, ``ID.csv``, or aligned FASTA, ``ID.fasta``
(:mod:`fastfold.data.msa.other_files`); and for any chain ``<SHA-256 of its sequence>.aligned.pqt`` (Chai).

Such a folder may also have alignments in a folder ``a3m``, and template hits in ``hhr`` (OpenProteinSet). Every file
may end in ``.gz``. Chains with equal sequences share the files of the first of them. AlphaFold's searches have
AlphaFold's names (``uniref90_hits.sto``, ``bfd_uniref_hits.a3m``, ``mgnify_hits.sto``, ``uniprot_hits.sto``), order,
and limits of rows (:data:`MAX_ROWS`). Protenix' ``pairing.a3m`` is paired, and also used for the chain alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from fastfold.data.msa.choose import ChosenFiles, ChosenRows, PlaceFiles, choose_files
from fastfold.data.msa.formats import ChainPart, parse_colabfold, parse_stockholm
from fastfold.data.msa.keyed import pair_by_keys
from fastfold.data.msa.msa import ChainMsas, Msa, check_query, colabfold_header, parse_a3m
from fastfold.data.msa.other_files import (
    OTHER_ENDINGS,
    chai_file,
    is_other_alignment,
    named_like,
    parse_other_file,
)
from fastfold.data.targets import Chain, Target, safe_stem
from fastfold.errors import InputError
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.option_fields import check_path
from fastfold.utils.text_files import FileSlice, PathLike, check_listed, read_text_bytes

MAX_ALIGNMENT_BYTES = 1 << 32

_EXTENSIONS = (".a3m", ".a3m.gz", ".sto", ".sto.gz")
# UniRef90, BFD (searched with UniClust30 or UniRef30, or in its small form), MGnify.
_ORDER = ("uniref90", "pairing"), ("bfd", "small_bfd", "uniclust30", "uniref30"), ("mgnify",)
_PAIRING, _COMPLEX_PAIRS = "uniprot_hits", "colabfold_pairs"
_PROTENIX_PAIRING = "pairing"
_RAW_ALIGNMENTS, _RAW_HITS = "a3m", "hhr"
TEMPLATE_HITS = (
    ("pdb_hits", ".sto"),
    ("pdb_hits", ".hhr"),
    ("hmm_output", ".sto"),
    ("hmmsearch_output", ".sto"),
    ("pdb70_hits", ".hhr"),
)
"""Names of the template searches of AlphaFold-Multimer, AlphaFold and OpenFold."""
_HIT_FILES = tuple(f"{stem}{end}{packed}" for stem, end in TEMPLATE_HITS for packed in ("", ".gz"))

MAX_ROWS = {"uniref90_hits": 10_000, "mgnify_hits": 501, _PAIRING: 50_000}
"""Largest number of rows that AlphaFold reads of a search, including the query, by file name."""

AlignmentFile = Path | FileSlice
"""File, or part of an alignment database (:mod:`fastfold.data.training.index_tables`)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChainAlignments:
    """Alignment files of one chain."""

    #: Files in the order of the network's rows: UniRef90, BFD, MGnify, then by name
    unpaired: list[AlignmentFile] = field(default_factory=list)
    #: UniProt search, used only to pair the chains of a complex by species
    paired: list[AlignmentFile] = field(default_factory=list)
    #: Rows of a complex that pair its chains, in ColabFold's format
    complex_pairs: list[AlignmentFile] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.unpaired or self.paired)


def read_msa(path: PathLike, *, query: str | None = None) -> Msa:
    r"""Read an alignment with suffix ``.a3m`` or ``.sto``, plain or ``.gz``.

    Args:
        path: Path of the file.
        query: Expected sequence of the query; X equals letters that are read as X.

    Raises:
        ConfigError: The path is not one.
        InputError: The file cannot be read, is not such an alignment, or belongs to another sequence.

    Example:
        >>> from pathlib import Path
        >>> from fastfold.data import read_msa
        >>> _ = Path("query.a3m").write_text(">query\nMTYK\n>homolog\nM-YK\n")
        >>> read_msa("query.a3m", query="MTYK").sequences
        ('MTYK', 'M-YK')
    """
    check_path(path)
    parse = parse_stockholm if _is_stockholm(path) else parse_a3m
    msa = parse(_read_text(path), path=path)
    if query is not None:
        check_query(msa, query, path=path)
    return msa


def read_hits(path: PathLike, *, query: str) -> Msa:
    """Read an alignment of a sequence, also of other programs, with AlphaFold's limits of rows for its searches.

    The name of the file identifies the search; ``query`` and errors are those of :func:`read_msa`.
    """
    if os.fspath(path).lower().endswith(OTHER_ENDINGS):
        msa = parse_other_file(path, limit=MAX_ALIGNMENT_BYTES)
        check_query(msa, query, path=path)
        return msa
    msa = read_msa(path, query=query)
    limit = MAX_ROWS.get(os.path.basename(os.fspath(path)).split(".")[0])
    if limit is None or len(msa.sequences) <= limit:
        return msa
    return msa.take(range(limit))


def find_alignments(msa_dir: PathLike, name: str, *, chain: Chain | None = None) -> ChainAlignments:
    """Find the alignment files of a name, or of one chain of a complex of that name; empty if there are none.

    The name, as in the FASTA file, is looked up unchanged if it cannot lead out of the folder, in the other normal form
    of Unicode, and in the safe form of output files.

    Raises:
        InputError: ``msa_dir`` is not a folder, or the target's folder contains no alignment.
    """
    files, empty = _find(msa_dir, [name], chain)
    if not files and empty is not None:
        raise _holds_nothing(empty)
    return files


def target_alignments(msa_dir: PathLike | None, target: Target) -> Sequence[ChainMsas]:
    """Return the alignments of a target's whole chains: its own, those of a folder, or empty ones without a folder.

    Raises:
        InputError: See :func:`load_alignments`.
    """
    return target_rows(msa_dir, target).chains


class TargetRows(NamedTuple):
    """Alignments of a target with the files that they are from."""

    chains: Sequence[ChainMsas]  #: Per chain its alignments, see :func:`load_alignments`
    files: Mapping[str, Sequence[str]]  #: Names of files by chain, relative to the folder of alignments


def target_rows(msa_dir: PathLike | None, target: Target) -> TargetRows:
    """Return the alignments of :func:`target_alignments` with the files that they are from; errors are the same."""
    rows: list[ChainMsas] = [([], []) for _ in target.chains]
    names: dict[str, Sequence[str]] = {chain.id: [] for chain in target.chains}
    whole = target.uncut
    if msa_dir is not None and not target.has_all_alignments:
        chosen = chosen_files(msa_dir, whole)
        rows = read_chosen(chosen, whole)
        for chain in whole.chains:
            paths = chosen.files(chain.sequence)
            names[chain.id] = [os.path.relpath(path, msa_dir).replace(os.sep, "/") for path in paths]
    source = [Path(target.source).name] if target.source else []
    for index, (chain, own) in enumerate(zip(target.chains, target.alignments or (), strict=False)):
        if own is not None:
            rows[index] = own
            names[chain.id] = (target.alignment_files or {}).get(chain.id, source if any(own) else [])
    return TargetRows(pair_by_keys([chain.sequence for chain in whole.chains], rows), names)


def unread_files(msa_dir: PathLike, target: Target, chain: Chain) -> list[Path]:
    """Return files named like a chain without an alignment that no reader takes, without the target's own file."""
    names = _names(target)
    places = list(_places(Path(msa_dir), names, chain)) if target.is_complex else []
    if not target.is_complex or chain.record:
        places += _places(Path(msa_dir), names, None)
    own = os.path.realpath(target.source) if target.source else ""
    with _searching(msa_dir, "alignments"):
        paths = [path for place in dict.fromkeys(places) for path in named_like(place)]
    return [path for path in dict.fromkeys(paths) if os.path.realpath(path) != own]


def count_rows(msa_dir: PathLike | None, target: Target) -> int:
    """Return the number of alignment rows of a target; 0 if its alignments cannot be used, which its fold reports."""
    try:
        alignments = target_alignments(msa_dir, target)
    except InputError:
        return 0
    return sum(len(msa.sequences) for chain in alignments for group in chain for msa in group)


def load_alignments(msa_dir: PathLike, target: Target) -> list[ChainMsas]:
    """Read the alignments of all chains of a target.

    Returns:
        Per chain its alignments, and those for pairing (UniProt, or ColabFold's paired rows; empty for a target of one
        chain). Both are empty without files: the chain is folded from its sequence alone. Chains with equal sequences
        share one pair of lists.

    Raises:
        InputError: An alignment is invalid, belongs to another sequence, or cannot be assigned to a chain.
    """
    return read_chosen(chosen_files(msa_dir, target), target)


def chosen_files(msa_dir: PathLike, target: Target) -> ChosenFiles:
    """Find the alignment files of a target in a folder, and choose those of each chain.

    Raises:
        InputError: ``msa_dir`` is not a folder, or cannot be searched.
    """
    names = _names(target)
    chains: dict[str, list[PlaceFiles]] = {chain.sequence: [] for chain in target.chains}
    with _searching(msa_dir, "alignments"):
        folder = _checked_folder(msa_dir)
        for chain in target.chains if target.is_complex else ():
            home = folder / target.name / chain.id
            for place in _places(folder, names, chain):
                chains[chain.sequence] += _place_files(place, is_home=place == home)
        whole = [files for place in _whole_places(folder, target) for files in _place_files(place)]
        for chain in target.chains:
            files = [PlaceFiles(own=(path,)) for path in chai_file(folder, chain)]
            chains[chain.sequence] += files if target.is_complex else []
            whole += [] if target.is_complex else files
        return choose_files(chains, whole, is_complex=target.is_complex, is_joined=_is_joined)


def read_chosen(chosen: ChosenFiles, target: Target) -> list[ChainMsas]:
    """Read the chosen files of a target; the result and errors are those of :func:`load_alignments`."""
    if chosen.empty is not None:
        raise _holds_nothing(chosen.empty)
    parts: dict[Path, dict[str, ChainPart]] = {}

    def read(sequence: str, rows: ChosenRows, kind: int) -> list[Msa]:
        if not rows.of_complex:
            return [read_hits(path, query=sequence) for path in rows.files]
        for path in rows.files:
            if path not in parts:
                parts[path] = _read_complex(path, target)
        return [msa for path in rows.files for msa in parts[path][sequence].msas[kind]]

    msas: dict[str, ChainMsas] = {}
    for sequence, own in chosen.own.items():
        pairs = chosen.pairs[sequence] if target.is_complex else ChosenRows()
        msas[sequence] = read(sequence, own, 0), read(sequence, pairs, 1)
    sequences = [chain.sequence for chain in target.chains]
    return pair_by_keys(sequences, [msas[sequence] for sequence in sequences])


def read_alignments(sequence: str, files: ChainAlignments) -> ChainMsas:
    """Read the alignments of a chain; errors are those of :func:`read_msa`."""
    unpaired, paired = (
        [read_hits(path, query=sequence) for path in group] for group in (files.unpaired, files.paired)
    )
    return unpaired, paired


def find_template_hits(msa_dir: PathLike, target: Target) -> dict[str, list[Path]]:
    """Find hits of template searches among the alignments of a target, by sequence of a chain.

    These are files such as ``pdb_hits.sto`` and ``pdb_hits.hhr`` in order of preference; chains without hits are
    absent.

    Raises:
        InputError: ``msa_dir`` cannot be searched.
    """
    names = _names(target)
    alike = len({chain.sequence for chain in target.chains}) == 1
    hits: dict[str, list[Path]] = {}
    with _searching(msa_dir, "template hits"):
        for chain in target.chains:
            places = list(_places(Path(msa_dir), names, chain)) if target.is_complex else []
            places += _whole_places(Path(msa_dir), target) if alike else ()
            if files := _first_hits(places):
                hits.setdefault(chain.sequence, files)
    return hits


def find_hits(msa_dir: PathLike, name: str, *, chain: Chain | None = None) -> list[Path]:
    """Find template hits for a name, or for one chain of a complex of that name, in order of preference.

    Arguments are those of :func:`find_alignments`.

    Raises:
        InputError: ``msa_dir`` cannot be searched.
    """
    with _searching(msa_dir, "template hits"):
        return _first_hits(_places(Path(msa_dir), [name], chain))


def _first_hits(places: Iterable[Path]) -> list[Path]:
    """Return the template hits at the first place that has any."""
    for place in places:
        for folder in (place, place / _RAW_HITS):
            if files := [folder / name for name in _HIT_FILES if (folder / name).is_file()]:
                return files
    return []


@contextlib.contextmanager
def _searching(msa_dir: PathLike, wanted: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        message, passing = f"cannot be searched for {wanted}: {error}", isinstance(error, OSError)
        raise InputError(message, path=msa_dir, temporary=passing) from None


def _read_complex(path: Path, target: Target) -> dict[str, ChainPart]:
    """Read ColabFold's alignment of a complex: the part of each sequence."""
    sequences = {chain.sequence for chain in target.chains}
    text = _read_text(path) if _is_a3m(path) else ""
    if colabfold_header(text, path=path) is None:
        names = ", ".join(f"{target.name}_{chain.id}.a3m" for chain in target.chains)
        message = f"one alignment for {len(sequences)} different chains; give separate ones: {names}"
        raise InputError(message, path=path, record=target.record)
    parts, warnings = parse_colabfold(text, path=path)
    for warning in warnings:
        _log.warning("%s: %s", path, warning)
    part_of = {mask_unknown(part.query): part for part in parts}
    if set(part_of) != sequences:
        own = dict.fromkeys(chain.sequence for chain in target.chains)
        lengths = [", ".join(str(len(s)) for s in of) for of in (part_of, own)]
        raise InputError(
            f"the alignment has another sequence in at least one chain: its chains have {lengths[0]} residues, the "
            f"target's {lengths[1]}; align the target's chains or remove the file",
            path=path,
            record=target.record,
        )
    return part_of


def _is_joined(path: Path) -> bool:
    return _is_a3m(path) and colabfold_header(_read_text(path), path=path) is not None


def _is_a3m(path: PathLike) -> bool:
    return os.fspath(path).lower().removesuffix(".gz").endswith(".a3m")


def _is_stockholm(path: PathLike) -> bool:
    name = os.fspath(path).lower().removesuffix(".gz")
    if not name.endswith((".a3m", ".sto")):
        raise InputError("the name of an alignment must end in .a3m or .sto (or .gz after it)", path=path)
    return name.endswith(".sto")


def _read_text(path: PathLike) -> str:
    # Descriptions may hold any characters; invalid residues are refused in their row.
    return read_text_bytes(path, limit=MAX_ALIGNMENT_BYTES).decode("utf-8", "replace")


def _find(msa_dir: PathLike, names: list[str], chain: Chain | None) -> tuple[ChainAlignments, Path | None]:
    """Return the files at the first place for one of the names, or the first empty folder."""
    empty = None
    with _searching(msa_dir, "alignments"):
        for place in _places(_checked_folder(msa_dir), names, chain):
            files = _files_at(place)
            if files.unpaired or (files.paired and chain is not None):
                return files, None
            empty = empty or (place if place.is_dir() else None)
    return ChainAlignments(), empty


def _checked_folder(msa_dir: PathLike) -> Path:
    folder = Path(msa_dir)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "no such folder"
        raise InputError(f"{problem}; give the folder of the alignments", path=msa_dir)
    return folder


def _place_files(place: Path, *, is_home: bool = False) -> Iterator[PlaceFiles]:
    """Yield the file of a place, then those in its folder."""
    if (file := _file_at(place)) is not None:
        yield PlaceFiles((file,))
    if place.is_dir():
        files = alignments_of_folder(place)
        groups = (files.unpaired, files.paired, files.complex_pairs)
        own, paired, pairs = (tuple(Path(path) for path in group) for group in groups)
        yield PlaceFiles(own, paired, pairs, is_home, None if own else place)


def _holds_nothing(folder: Path) -> InputError:
    return InputError(
        "contains no alignment (.a3m or .sto, plain or with .gz; uniprot_hits is used only to pair chains); add "
        "one, or remove the folder to fold from the sequence alone",
        path=folder,
    )


def _names(target: Target) -> list[str]:
    """Return the names under which files of a whole target are found; one chain may be a part of another record."""
    of_chain = [] if target.is_complex else [target.chains[0].record]
    return list(filter(None, [target.record, target.name, *of_chain]))


def _places(folder: Path, names: list[str], chain: Chain | None) -> Iterator[Path]:
    """Yield paths without extension where alignments can be, in order of preference."""
    stems = _lookup_stems(names)
    if chain is not None:
        for stem in stems:
            yield from (
                folder / stem / chain.id,
                folder / stem / "msas" / chain.id,
                folder / f"{stem}_{chain.id}",  # last, because it may be the name of another target
            )
        if chain.record_chain:
            yield from _places(folder, [chain.record], Chain(chain.record_chain, chain.sequence))
            return
        stems = _lookup_stems([chain.record]) if chain.record else []
    for stem in stems:
        yield from (folder / stem, folder / stem / "msas")


def _whole_places(folder: Path, target: Target) -> Iterator[Path]:
    """Yield the places of a whole target; AlphaFold-Multimer has those of a single chain in a folder of the chain."""
    names = _names(target)
    yield from _places(folder, names, None)
    if not target.is_complex:
        yield from (folder / stem / "msas" / target.chains[0].id for stem in _lookup_stems(names))


def _lookup_stems(names: list[str]) -> list[str]:
    """Return the names that cannot lead out of a folder, composed and decomposed, then their safe forms.

    File systems and programs write ``é`` as one letter or as two. The order matters, because the safe form of one
    target's name may be the name of another.
    """
    stems: dict[str, None] = {}
    forms = [normalize(form, name) for form in ("NFC", "NFD") for name in names]
    for name in (*names, *forms):
        raw = name.encode("utf-8", "replace")
        if name not in ("", ".", "..") and len(raw) <= 200 and not any(c in name for c in "/\\\0:"):
            stems[name] = None
    return list(stems | dict.fromkeys(map(safe_stem, names)))


def _files_at(place: Path) -> ChainAlignments:
    """Return the alignment file of a place, or those in the folder of that name."""
    file = _file_at(place)
    return alignments_of_folder(place) if file is None else ChainAlignments([file], [])


def _file_at(place: Path) -> Path | None:
    """Return the alignment file of a place with its extension."""
    for extension in _EXTENSIONS:
        file = place.parent / (place.name + extension)
        if os.path.lexists(file):
            check_listed(file)
            return file
    others = (place.parent / (place.name + ending) for ending in OTHER_ENDINGS)
    readable = (one for one in others if one.is_file() and is_other_alignment(one, limit=MAX_ALIGNMENT_BYTES))
    return next(readable, None)


def alignments_of_folder(place: Path) -> ChainAlignments:
    """Return the alignments in a folder of one chain; empty without any, and without the folder."""
    if not place.is_dir():
        return ChainAlignments()
    files: dict[str, AlignmentFile] = {}
    for folder in (place, place / _RAW_ALIGNMENTS):
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if file.name.endswith(_EXTENSIONS) and not file.name.startswith("."):
                check_listed(file)
                files.setdefault(file.name.removesuffix(".gz"), file)
    return sorted_alignments(files.values())


def sorted_alignments(files: Iterable[AlignmentFile]) -> ChainAlignments:
    """Sort a chain's alignments by name; template hits and other files are left out."""
    named = {os.fspath(file).removesuffix(".gz"): file for file in files if file.name.endswith(_EXTENSIONS)}
    unpaired, paired, complex_pairs = [], [], []
    for path in sorted(named, key=lambda path: _order(os.path.basename(path))):
        stem = os.path.basename(path).rsplit(".", 1)[0]
        if stem in (_PAIRING, _PROTENIX_PAIRING):
            paired.append(named[path])
        if stem == _COMPLEX_PAIRS:
            complex_pairs.append(named[path])
        elif stem != _PAIRING and stem not in {name for name, _ in TEMPLATE_HITS}:
            unpaired.append(named[path])
    return ChainAlignments(unpaired, paired, complex_pairs)


def sorted_hits(files: Iterable[AlignmentFile]) -> list[AlignmentFile]:
    """Return the template hits among a chain's files, in order of preference."""
    named = {file.name: file for file in files}
    return [named[name] for name in _HIT_FILES if name in named]


def _order(name: str) -> tuple[int, str]:
    """Sort AlphaFold's searches in its order, then other files by name."""
    return next((i for i, starts in enumerate(_ORDER) if name.startswith(starts)), len(_ORDER)), name
