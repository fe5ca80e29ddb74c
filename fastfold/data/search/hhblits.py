"""The engine hhblits: BFD and UniRef30 in HH-suite's format, with the settings of AlphaFold.

Remmert et al., Nature Methods 9, 173 (2012) describe HHblits. All databases are searched together, as in AlphaFold,
which calls the result ``bfd_uniref_hits.a3m``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastfold.data.msa.msa import check_query, parse_a3m
from fastfold.data.search.database import SequenceDatabase
from fastfold.data.search.engine import Found, Report, SearchStage
from fastfold.data.search.programs import find_program, program_output, search_profiles
from fastfold.data.search.store import SearchKey, SearchStore
from fastfold.errors import ConfigError, InputError
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.hashing import input_hash

JOINED = "bfd_uniref"  #: Name of a search in several databases

FLAGS = (
    *("-n", "3", "-e", "0.001", "-maxseq", "1000000", "-realign_max", "100000"),
    *("-maxfilt", "100000", "-min_prefilter_hits", "1000"),
)
"""Flags of AlphaFold's call."""

_PARTS = ("a3m", "hhm", "cs219")


def is_cluster_database(path: Path) -> bool:
    """Return True for the common beginning of the names of a database's files, with or without a missing part."""
    return any(Path(f"{path}_{part}.ffindex").is_file() for part in _PARTS)


@dataclass(frozen=True)
class HhblitsEngine:
    """Search of HH-suite's databases; see :class:`~fastfold.data.search.engine.SearchEngine`.

    Raises:
        ConfigError: The program is not installed.
        InputError: A part of a database is missing.
    """

    #: Databases that are searched together. A path is the common beginning of the names of its files.
    databases: tuple[SequenceDatabase, ...]
    num_threads: int = 1  #: Threads of the program

    def __post_init__(self) -> None:
        for database in self.databases:
            missing = [path.name for path in _files(database) if not path.is_file()]
            if missing:
                raise InputError(
                    f"expected a database of HH-suite, found no {', '.join(missing)}; download or copy it again",
                    path=database.path,
                )
        _ = self._program

    @property
    def name(self) -> str:
        """Name of the search: ``bfd_uniref`` for several databases, else the database's."""
        return JOINED if len(self.databases) > 1 else self.databases[0].name

    @cached_property
    def _program(self) -> str:
        path = find_program("hhblits")
        if path is None:
            raise ConfigError(
                f"{self.databases[0].path} is a database of HH-suite, and hhblits is not installed: install HH-suite "
                "(apt install hhsuite) or the Python package colabfold-binaries, or search a FASTA file instead"
            )
        return path

    @cached_property
    def _version(self) -> str:
        done = program_output(self._program, "-h", remedy="install another build")
        first = done.stdout.decode("utf-8", "replace").strip().partition("\n")[0]
        return first.rstrip(":") or "unknown"

    def key(self, store: SearchStore) -> SearchKey:
        """Return what decides the results besides the sequences; databases are known by names and sizes of files."""
        files = [path for database in self.databases for path in _files(database)]
        identity = input_hash([[path.name, path.stat().st_size] for path in files])
        settings = {
            "engine": "hhblits",
            "version": self._version,
            "flags": list(FLAGS),
            "databases": identity,
        }
        return SearchKey(self.name, settings)

    def cost(self, sequences: Sequence[str]) -> float:
        """Return bytes of the databases' prefilters times residues of the sequences."""
        prefilters = (Path(f"{database.path}_cs219.ffdata") for database in self.databases)
        return float(sum(path.stat().st_size for path in prefilters)) * sum(map(len, sequences))

    def search(self, sequences: Sequence[str], report: Report) -> Iterator[Found]:
        """Search for sequences, one after the other.

        Raises:
            InputError: The program fails, or does not return an alignment of the sequence.
        """
        for sequence in sequences:
            text = self._search(sequence)
            report(SearchStage(self.cost([sequence])))
            facts = {
                "databases": [str(database.path) for database in self.databases],
                "rows": text.count(">"),
            }
            yield Found(sequence, {f"{self.name}_hits.a3m": text.encode()}, facts)

    def _search(self, sequence: str) -> str:
        flags = ("-cpu", str(self.num_threads), "-o", "/dev/null", *FLAGS)
        paths = [database.path for database in self.databases]
        text = search_profiles(self._program, f">query\n{sequence}\n", paths, output="-oa3m", flags=flags)
        check_query(parse_a3m(text, path=self._program), mask_unknown(sequence), path=self._program)
        return text


def _files(database: SequenceDatabase) -> list[Path]:
    return [Path(f"{database.path}_{part}.{end}") for part in _PARTS for end in ("ffdata", "ffindex")]
