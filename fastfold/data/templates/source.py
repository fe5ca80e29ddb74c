"""Find the templates of a run's targets in its sources."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from fastfold.data.msa.find import ChainMsas, find_template_hits
from fastfold.data.msa.msa import Msa
from fastfold.data.search.colabfold.server_templates import (
    DATABASE,
    find_server_templates,
    unpacked_templates,
)
from fastfold.data.search.programs import find_program
from fastfold.data.targets import Chain, Target
from fastfold.data.templates.custom import (
    custom_templates,
    read_custom_alignment,
    read_custom_chains,
)
from fastfold.data.templates.database import MmcifFolder
from fastfold.data.templates.hit_table import read_hit_chains, read_hit_table, write_sequence_database
from fastfold.data.templates.hits import Outcome, TemplateHit, parse_hhr, parse_hmmsearch
from fastfold.data.templates.options import TemplateOptions
from fastfold.data.templates.search import hhsearch, hmmsearch, is_profile_database
from fastfold.data.templates.select import ChainTemplates, choose_templates
from fastfold.data.templates.whole.complexes import ChainMap, complex_templates, read_whole
from fastfold.errors import ConfigError, InputError
from fastfold.utils.hashing import input_hash
from fastfold.utils.packages import require_package
from fastfold.utils.text_files import PathLike, read_text_bytes

_log = logging.getLogger(__name__)

MAX_HITS_BYTES = 1 << 30
_KEPT = 32
"""Number of chains whose templates and hits are kept in memory, because targets of a run often share chains."""

T = TypeVar("T")


def open_templates(options: TemplateOptions) -> TemplateFinder | None:
    """Open sources of templates as :class:`TemplateFinder`; None if they name no templates."""
    return TemplateFinder(options) if options.wanted else None


class TemplateFinder:
    """Finder of templates.

    The constructor checks or reads all given files.

    Raises:
        ConfigError: hhsearch is needed and not installed.
        InputError: A structure, an alignment or a folder is missing or invalid.
    """

    def __init__(self, options: TemplateOptions) -> None:
        self.options = options
        self.structures, self._unusable = read_custom_chains(options.structures)
        self.alignments = [read_custom_alignment(path) for path in options.alignments]
        self.complexes = [read_whole(path, min_plddt=options.min_plddt) for path in options.complexes]
        self._chain_map = None if options.chain_map is None else ChainMap(options.chain_map)
        if self._chain_map is not None:
            self._chain_map.check(self.complexes)
        self.chains = [chain for path in options.chains for chain in read_whole(path)]
        self._found: OrderedDict[str, ChainTemplates] = OrderedDict()
        self._searched: OrderedDict[str, list[TemplateHit]] = OrderedDict()
        self._said: set[str] = set()
        self._entries = None
        if options.mmcif_dir is not None:
            self._entries = MmcifFolder(options.mmcif_dir, obsolete=options.obsolete)
        self._hit_ids = [] if options.hits is None else read_hit_table(options.hits)
        self._hit_chains: tuple[dict[str, str], list[Outcome]] | None = None
        for is_needed, option in (
            (options.server, "`templates` without files aligns the MSA server's hits"),
            (options.hits is not None, "`TemplateOptions.hits` aligns the entries"),
        ):
            if is_needed and find_program("hhsearch") is None:
                raise ConfigError(
                    f"{option} by hhsearch, which is not installed: install HH-suite or the Python package "
                    "colabfold-binaries, or give structures of your own after `templates`"
                )
        if options.database is not None:
            if is_profile_database(options.database):
                if find_program("hhsearch") is None:
                    raise ConfigError(
                        f"{options.database} is an HH-suite database, and hhsearch is not installed: install "
                        "HH-suite or the Python package colabfold-binaries, or give pdb_seqres.txt, which needs "
                        "neither"
                    )
            elif not options.database.is_file():
                raise InputError(
                    "no such file; give pdb_seqres.txt, or the common prefix of an HH-suite database's files (…/pdb70)",
                    path=options.database,
                )
            else:
                require_package("pyhmmer", "a search for templates in a FASTA file")

    def find(
        self, target: Target, alignments: Sequence[ChainMsas], msa_dir: Path | None = None
    ) -> list[ChainTemplates]:
        """Find the templates of each whole chain of a target: whole complexes, the user's structures, then hits.

        Hits among the target's alignments are used; otherwise the database is searched. Structures and hits without
        atoms in the parts that a chain has of its protein are left out. The alignments are those of whole chains.

        Raises:
            InputError: Hits, the database, or an alignment of the user are invalid.
        """
        parts, target = list(map(parts_of, target.chains)), target.uncut
        files: dict[str, list[Path]] = {}
        if msa_dir is not None and self.options.mmcif_dir is not None and not target.has_all_alignments:
            files = find_template_hits(msa_dir, target)
        if msa_dir is not None and self.options.server:
            served = find_server_templates(msa_dir, target)
            files |= {sequence: [path] for sequence, path in served.items()}
        profiles = [
            profile_msa(chain.sequence, msas) for chain, msas in zip(target.chains, alignments, strict=True)
        ]
        per_chain = []
        for chain, msa, own in zip(target.chains, profiles, parts, strict=True):
            here = files.get(chain.sequence, [])[:1]
            key = input_hash(chain.sequence, msa.sequences, msa.deletions, here, sorted(own or ()))
            of_chain = partial(self._of_chain, chain.sequence, msa, here, own)
            per_chain.append(_remembered(self._found, key, of_chain))
        if not self.complexes:
            return per_chain
        whole = complex_templates(
            [chain.sequence for chain in target.chains],
            profiles,
            self.complexes,
            self.chains,
            keep_clashes=self.options.keep_clashes,
            overlap=self.options.overlap,
            chain_map=None if self._chain_map is None else self._chain_map.of_target(target.chains),
            parts=parts,
        )
        return [first + second for first, second in zip(whole, per_chain, strict=True)]

    def _of_chain(
        self, query: str, msa: Msa, files: Sequence[Path], parts: frozenset[int] | None
    ) -> ChainTemplates:
        options = self.options
        own = ChainTemplates()
        most = options.max_templates - len(self.complexes)
        if self.structures and most:
            own = custom_templates(
                self.structures,
                query,
                msa,
                max_templates=most,
                alignments=self.alignments,
                unusable=self._unusable,
                parts=parts,
            )
        wanted = most - len(own.templates)
        choose = partial(
            choose_templates,
            query=query,
            max_templates=wanted,
            max_date=options.max_date,
            earlier=own.templates,
            parts=parts,
        )
        if files and options.server and wanted:
            # An MSA server's hits are aligned by hhsearch, as in ColabFold.
            with unpacked_templates(files[0]) as folder:
                hits = parse_hhr(hhsearch(msa, [folder / DATABASE]), query, path=files[0])
                entries = MmcifFolder(folder, obsolete=options.obsolete)
                return own + choose(hits, database=entries, source=files[0].name)
        if self._entries is None or not wanted:
            return own
        if options.hits is not None:
            chains, left_out = self._chains_of_hits(self._entries)
            with TemporaryDirectory(prefix="fastfold-templates-") as folder:
                write_sequence_database(chains, Path(folder) / DATABASE)
                text = hhsearch(msa, [Path(folder) / DATABASE]) if chains else ""
            hits = parse_hhr(text, query, path=options.hits) if chains else []
            chosen = choose(hits, database=self._entries, source=options.hits.name)
            return own + replace(chosen, outcomes=(*chosen.outcomes, *left_out))
        if files:
            hits, source = read_hits(files[0], query), files[0].name
        elif options.database is not None:
            hits, source = self._search(query, msa, options.database), options.database.name
        else:
            return own
        return own + choose(hits, database=self._entries, source=source)

    def _chains_of_hits(self, entries: MmcifFolder) -> tuple[dict[str, str], list[Outcome]]:
        """Return the chains of the listed entries, read once."""
        if self._hit_chains is None:
            self._hit_chains = read_hit_chains(self._hit_ids, entries)
        return self._hit_chains

    def _search(self, query: str, msa: Msa, database: Path) -> list[TemplateHit]:
        """Return the hits of a search, made once for all parts of a protein."""
        key = input_hash(query, msa.sequences, msa.deletions)
        return _remembered(self._searched, key, partial(self._run_search, query, msa, database))

    def _run_search(self, query: str, msa: Msa, database: Path) -> list[TemplateHit]:
        if is_profile_database(database):
            return parse_hhr(hhsearch(msa, [database]), query, path=database)
        return parse_hmmsearch(hmmsearch(msa, database, say=self._say_once), query, path=database)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            _log.warning("%s", line)


def _remembered(cache: OrderedDict[str, T], key: str, make: Callable[[], T]) -> T:
    """Return a value of a cache, made if the cache lacks it; the cache keeps those of the last uses."""
    if key not in cache:
        cache[key] = make()
    cache.move_to_end(key)
    if len(cache) > _KEPT:
        cache.popitem(last=False)
    return cache[key]


def parts_of(chain: Chain) -> frozenset[int] | None:
    """Return the residues, from 0, that a chain has of its protein; None for all."""
    return frozenset(number - 1 for number in chain.numbers) if chain.regions else None


def profile_msa(query: str, msas: ChainMsas) -> Msa:
    """Return the alignment for template searches: a chain's first (UniRef90), or the query alone.

    Rows without a residue are left out, and the first row is the query.
    """
    alone = Msa((query,), np.zeros((1, len(query)), np.int32), ("query",))
    if not msas[0]:
        return alone
    msa = msas[0][0]
    kept = [i for i, row in enumerate(msa.sequences) if row.strip("-")]
    rows = replace(msa.take(kept), as_is=False)
    if kept[:1] == [0] and len(msa.sequences[0].replace("-", "")) == len(query):
        return rows
    deletions = np.concatenate([alone.deletions, rows.deletions])
    return Msa((query, *rows.sequences), deletions, ("query", *rows.descriptions))


def read_hits(path: PathLike, query: str) -> list[TemplateHit]:
    """Read the hits of a search: HHsearch's output (``.hhr``), or an alignment of hmmsearch (``.sto``).

    Raises:
        InputError: The file cannot be read, is damaged, or belongs to another sequence.
    """
    name = os.fspath(path).lower().removesuffix(".gz")
    if not name.endswith((".hhr", ".sto")):
        raise InputError(
            "the name of a file of template hits must end in .hhr or .sto (or .gz after it)", path=path
        )
    text = read_text_bytes(path, limit=MAX_HITS_BYTES).decode("utf-8", "replace")
    return (parse_hhr if name.endswith(".hhr") else parse_hmmsearch)(text, query, path=path)
