"""Alignments by MMseqs2 on local databases in ColabFold's layout, with the steps of ColabFold's pipeline.

A database is a set of clusters: ``<name>`` has a sequence of each, ``<name>_seq`` all sequences, ``<name>_aln`` their
alignments. ``<name>.idx`` is an optional index of all of them. Steps and settings are those of ``colabfold_search``
(Mirdita et al., Nature Methods 19, 679, 2022): three iterations of search, expansion to the members of the found
clusters (``expandaln``), alignment to the profile (``align``), a filter, and the alignment; then the same in
environmental sequences, starting from the profile. Chains of a complex are paired by the species of their hits
(``pairaln``), for which the database needs ``<name>_mapping`` and ``<name>_taxonomy``.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastfold.data.search.colabfold.source import (
    FILE,
    FIRST_QUERY,
    Chains,
    ColabFoldSource,
    Files,
    fasta_of,
    split_queries,
)
from fastfold.data.search.programs import find_program, program_output, run_session
from fastfold.data.search.settings import ColabFoldModes, MsaMode
from fastfold.errors import ConfigError
from fastfold.utils.hashing import input_hash
from fastfold.utils.machine import available_cores

UNIREF, ENVIRONMENT = "uniref30_2302_db", "colabfold_envdb_202108_db"  #: Names of ColabFold's databases

_FILTER = "--filter-msa 1 --filter-min-enable 1000 --diff 3000 --qid 0.0,0.2,0.4,0.6,0.8,1.0 --qsc 0 --max-seq-id 0.95"
_SEARCH = "--num-iterations 3 -a -e 0.1 --max-seqs 10000"
_ON_CPU, _ON_GPU = "--k-score seq:96,prof:80", "--gpu 1 --prefilter-mode 1"
_EXPAND, _DISTINCT = "--expansion-mode 0 -e inf", "--max-seq-id 0.95 --expand-filter-clusters"
_ALIGN = "-e 10 --max-accept 100000 --alt-ali 10 -a"
_LAST_LINES = 8
_CHOOSE = "--qid 0 --qsc 0.8 --diff 0 --max-seq-id 1.0 --filter-min-enable 100"


class Mmseqs:
    """The program, run step by step."""

    def __init__(self, path: Path, *, threads: int, log: Path) -> None:
        self.path, self._threads, self._log = path, threads, log

    @cached_property
    def version(self) -> str:
        """Return the version reported by the program.

        Raises:
            ConfigError: The program does not run on this machine.
        """
        return self._output("version").strip()

    @cached_property
    def has_gpu_flag(self) -> bool:
        """Return True if a search supports ``--gpu``."""
        return "--gpu " in self._output("search", "--help")

    def run(self, command: str, *arguments: str | Path, threaded: bool = True) -> None:
        """Run one step, such as ``search``, with a number of threads where the command takes one.

        Raises:
            ConfigError: The step fails; has the end of its output.
        """
        line = [str(self.path), command, *map(str, arguments), "-v", "2"]
        line += ["--threads", str(self._threads)] if threaded else []
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(line)}\n".encode())
            log.flush()
            code = run_session(line, log)
        if code:
            end = "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:])
            raise ConfigError(f"mmseqs {command} failed with exit code {code}{self._reason(code)}:\n{end}")

    def _output(self, *arguments: str) -> str:
        done = program_output(self.path, *arguments, remedy="install another build of MMseqs2")
        if done.returncode < 0:
            raise ConfigError(f"{self.path}: does not run{self._reason(done.returncode)}")
        return (done.stdout + done.stderr).decode("utf-8", "replace")

    def _reason(self, code: int) -> str:
        if code == -signal.SIGILL:
            return " (it was built for a newer processor; install a build of MMseqs2 for this one)"
        return f" (signal {-code})" if code < 0 else ""


def find_mmseqs() -> Path:
    """Find the program; see :func:`~fastfold.data.search.programs.find_program`.

    Raises:
        ConfigError: The program is missing.
    """
    if path := find_program("mmseqs"):
        return Path(path)
    raise ConfigError(
        "`engine=mmseqs` needs the program mmseqs, which is not on PATH: install MMseqs2, or pip install "
        "'fastfold[mmseqs]'"
    )


@dataclass(frozen=True)
class _Database:
    """Files of a database as arguments of the steps."""

    main: Path
    members: str
    clusters: str
    load: str

    @classmethod
    def open(cls, folder: Path, name: str) -> _Database:
        """Open an existing database, with its index if available."""
        main = folder / name
        indexed = any((folder / f"{name}{end}").is_file() for end in (".idx", ".idx.index"))
        wanted = ("",) if indexed else ("", "_seq", "_aln")
        missing = [f"{name}{end}.dbtype" for end in wanted if not (folder / f"{name}{end}.dbtype").is_file()]
        if missing:
            raise ConfigError(
                f"{folder}: not a folder of databases in ColabFold's layout, it lacks {', '.join(missing)}; make it "
                "with ColabFold's setup_databases.sh"
            )
        if indexed:
            return cls(main, f"{main}.idx", f"{main}.idx", "2")
        return cls(main, f"{main}_seq", f"{main}_aln", "0")

    @property
    def identity(self) -> list[object]:
        """Return name and sizes of its files, which identify a release."""
        paths = sorted(path for path in self.main.parent.glob(f"{self.main.name}*") if path.is_file())
        return [[path.name, path.stat().st_size] for path in paths if ".idx" not in path.name]


def all_of_folder(folder: Path) -> MsaMode:
    """Return the mode that searches all of ColabFold's databases in a folder."""
    has_environment = (folder / f"{ENVIRONMENT}.dbtype").is_file()
    return "mmseqs2_uniref_env" if has_environment else "mmseqs2_uniref"


class MmseqsSource(ColabFoldSource):
    """MMseqs2 as a source of alignments.

    The folder has the database ``uniref30_2302_db``, and ``colabfold_envdb_202108_db`` to search environmental
    sequences too. ``modes`` is by default that of the folder, ``threads`` one for each processor that may be used.
    ``gpu`` takes databases that were prepared for one. A search has at most ``batch`` sequences; its intermediate
    files, in the folder ``temporary``, may take many times the size of the alignments.

    Raises:
        ConfigError: The program or a database is missing, or the program lacks GPU search.
    """

    def __init__(
        self,
        folder: Path,
        *,
        modes: ColabFoldModes | None = None,
        threads: int | None = None,
        gpu: bool = False,
        batch: int = 500,
        temporary: Path | None = None,
    ) -> None:
        self._uniref = _Database.open(folder, UNIREF)
        if modes is None:
            modes = ColabFoldModes(all_of_folder(folder))
        if modes.has_environment_pairs or modes.templates:
            wanted = "`templates` without files" if modes.templates else f"`msa_mode={modes.msa_mode}`"
            raise ConfigError(f"{wanted} needs `SearchSources.server`; `engine=mmseqs` cannot do it")
        self.modes = modes
        self._environment = _Database.open(folder, ENVIRONMENT) if modes.has_environment else None
        self._work = Path(tempfile.gettempdir() if temporary is None else temporary)
        self._threads = threads or available_cores()
        self._batch, self._folder = batch, folder
        self._gpu, self._prefilter = gpu, _ON_GPU if gpu else _ON_CPU
        self._path = find_mmseqs()
        with tempfile.TemporaryDirectory(dir=self._work) as place:
            program = Mmseqs(self._path, threads=1, log=Path(place) / "log")
            self._version = program.version
            if gpu and not program.has_gpu_flag:
                raise ConfigError(
                    f"{self._path}: this build of MMseqs2 lacks `gpu`; install version 17 or later"
                )

    @property
    def settings(self) -> Mapping[str, Any]:
        """Version of the program, settings and databases."""
        databases = [one.identity for one in (self._uniref, self._environment) if one is not None]
        return {
            "engine": "mmseqs",
            "version": self._version,
            "gpu": self._gpu,
            "steps": [_SEARCH, self._prefilter, _EXPAND, _DISTINCT, _ALIGN, _CHOOSE, _FILTER],
            "databases": input_hash(databases),
            **({} if self.modes.pair_strategy == "greedy" else {"pairing": self.modes.pair_strategy}),
        }

    def announce(
        self, sequences: Sequence[str], complexes: Sequence[Chains], say: Callable[[str], None]
    ) -> None:
        names = UNIREF if self._environment is None else f"{UNIREF} and {ENVIRONMENT}"
        say(
            f"mmseqs {self._version}: {len(sequences)} sequences in {names}, {len(complexes)} complexes to pair"
        )

    def unpaired(self, sequences: Sequence[str]) -> Iterator[tuple[str, Files]]:
        for start in range(0, len(sequences), self._batch):
            batch = sequences[start : start + self._batch]
            with tempfile.TemporaryDirectory(prefix="fastfold-mmseqs-", dir=self._work) as place:
                for sequence, text in zip(batch, self._search(Path(place), batch), strict=True):
                    yield sequence, {FILE: text.encode("ascii")}

    def paired(self, complexes: Sequence[Chains]) -> Iterator[tuple[Chains, list[str]]]:
        main = self._uniref.main
        species = [Path(f"{main}{end}").is_file() for end in ("_mapping", "_taxonomy", "_nodes.dmp")]
        if complexes and not (species[0] and (species[1] or species[2])):
            raise ConfigError(
                f"{self._folder}: {UNIREF}_mapping or {UNIREF}_taxonomy is missing, which pairing of chains needs; "
                "make the databases again with ColabFold's setup_databases.sh"
            )
        for start in range(0, len(complexes), self._batch):
            batch = complexes[start : start + self._batch]
            with tempfile.TemporaryDirectory(prefix="fastfold-mmseqs-", dir=self._work) as place:
                texts = iter(self._pair(Path(place), batch))
                for chains in batch:
                    yield chains, [next(texts) for _ in chains]

    def _program(self, place: Path, sequences: Sequence[str]) -> Mmseqs:
        """Return the program with the queries in ``place/query``."""
        program = Mmseqs(self._path, threads=self._threads, log=place / "log")
        (place / "query.fasta").write_text(fasta_of(sequences), "ascii")
        flags = ("--shuffle", "0", "--dbtype", "1")
        program.run("createdb", place / "query.fasta", place / "query", *flags, threaded=False)
        return program

    def _find(self, program: Mmseqs, query: Path, database: _Database, hits: Path, temporary: Path) -> None:
        search = f"{_SEARCH} {self._prefilter} --db-load-mode {database.load}"
        program.run("search", query, database.main, hits, temporary, *search.split())

    def _search(self, place: Path, sequences: Sequence[str]) -> list[str]:
        program = self._program(place, sequences)
        query = place / "query"
        self._find(program, query, self._uniref, place / "found", place / "tmp")
        program.run("mvdb", place / "tmp/latest/profile_1", place / "profile", threaded=False)
        program.run("lndb", place / "query_h", place / "profile_h", threaded=False)
        texts = self._align(program, place, self._uniref, query, place / "profile", sequences)
        if self._environment is not None:
            self._find(program, place / "profile", self._environment, place / "found", place / "tmp_env")
            profile = place / "tmp_env/latest/profile_1"
            environmental = self._align(
                program, place, self._environment, place / "profile", profile, sequences
            )
            texts = [text + more for text, more in zip(texts, environmental, strict=True)]
        return texts

    def _align(
        self,
        program: Mmseqs,
        place: Path,
        database: _Database,
        query: Path,
        profile: Path,
        sequences: Sequence[str],
    ) -> list[str]:
        """Align the found clusters of each query, and remove intermediate files."""
        load = ("--db-load-mode", database.load)
        members, own = database.members, place / "query"
        # As in ColabFold, clusters are filtered if the query is a sequence, and not if it is a profile.
        expand = f"{_EXPAND} {_DISTINCT} 1" if query == own else _EXPAND
        names = ("found", "expanded", "aligned", "chosen", "msa")
        hits, expanded, aligned, chosen, msa = (place / name for name in names)
        program.run("expandaln", query, members, hits, database.clusters, expanded, *load, *expand.split())
        program.run("align", profile, members, expanded, aligned, *load, *_ALIGN.split())
        program.run("filterresult", own, members, aligned, chosen, *load, *_CHOOSE.split())
        program.run(
            "result2msa", own, members, chosen, msa, "--msa-format-mode", "6", *load, *_FILTER.split()
        )
        texts = self._unpack(program, msa, sequences)
        for name in names:
            program.run("rmdb", place / name, threaded=False)
        return texts

    def _pair(self, place: Path, complexes: Sequence[Chains]) -> list[str]:
        sequences = [sequence for chains in complexes for sequence in chains]
        program = self._program(place, sequences)
        groups = [number for number, chains in enumerate(complexes) for _ in chains]
        lines = [f"{i}\t{FIRST_QUERY + i}\t{group}\n" for i, group in enumerate(groups)]
        (place / "query.lookup").write_text("".join(lines), "ascii")
        names = ("query", "found", "expanded", "aligned", "together", "traced", "final", "msa")
        query, hits, expanded, aligned, together, traced, final, msa = (place / name for name in names)
        database, load = self._uniref, ("--db-load-mode", self._uniref.load)
        members = database.members
        self._find(program, query, database, hits, place / "tmp")
        expand = f"{_EXPAND} {_DISTINCT} 0"
        program.run("expandaln", query, members, hits, database.clusters, expanded, *load, *expand.split())
        near = "-e 0.001 --max-accept 1000000 -c 0.5 --cov-mode 1"
        program.run("align", query, members, expanded, aligned, *load, *near.split())
        strategy = "1" if self.modes.pair_strategy == "complete" else "0"
        pair = (*load, "--pairing-mode", strategy, "--pairing-dummy-mode")
        program.run("pairaln", query, database.main, aligned, together, *pair, "0")
        program.run("align", query, members, together, traced, *load, "-e", "inf", "-a")
        program.run("pairaln", query, database.main, traced, final, *pair, "1")
        program.run("result2msa", query, members, final, msa, "--msa-format-mode", "5", *load)
        return self._unpack(program, msa, sequences)

    def _unpack(self, program: Mmseqs, msa: Path, sequences: Sequence[str]) -> list[str]:
        folder = msa.parent / "texts"
        program.run("unpackdb", msa, folder, "--unpack-name-mode", "0", "--unpack-suffix", ".a3m")
        content = b"\0".join(path.read_bytes() for path in sorted(folder.glob("*.a3m")))
        for path in folder.glob("*.a3m"):
            path.unlink()
        return split_queries(content, sequences, origin=str(self._path))
