"""Common part of MSA servers and MMseqs2: write the alignments of targets to a folder for ``--msa-dir``.

Each distinct sequence is searched once, and each combination of different chains is paired once, under any name;
results in the folder's store are not searched again. A single chain gets ``<id>/colabfold_hits.a3m``, a complex the
same with all of its chains in one alignment. Chains that have an alignment in the folder keep it
(:mod:`fastfold.data.search.needs`). The other chains of such a complex get ``<id>/<chain>/colabfold_hits.a3m``, and
``<id>/colabfold_pairs.a3m`` has the rows that pair all chains.

An MSA server and ``mmseqs result2msa`` write the alignments of several queries into one file, each ended by a NUL byte.
A complex gets one file in ColabFold's format (:func:`fastfold.data.msa.formats.parse_colabfold`): lengths and copies
of its different chains, then rows paired over all chains, then each chain's own rows with gaps for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fastfold.data.msa.msa import a3m_records, check_query, parse_a3m
from fastfold.data.search.needs import COLABFOLD as NAME
from fastfold.data.search.needs import SearchNeeds, find_needs
from fastfold.data.search.settings import ColabFoldModes, PairMode
from fastfold.data.search.store import FOLDER, SearchKey, SearchStore, chain_places, publish, withdraw
from fastfold.data.targets import Chain, Target
from fastfold.errors import FastFoldError, InputError
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.atomic_files import prepare_output_directory

FILE = f"{NAME}_hits.a3m"
PAIRS = f"{NAME}_pairs.a3m"  #: Rows that pair the chains of a complex, without each chain's own
TEMPLATES = "templates.tar.gz"  #: Structures and profiles of a chain's template hits, in the store

Chains = tuple[str, ...]  #: Different chains of a complex, in its order


Files = Mapping[str, bytes]
"""Files of a chain: its alignment :data:`FILE`, and :data:`TEMPLATES` where structures were fetched."""


class ColabFoldSource(Protocol):
    """Something that makes alignments as ColabFold does."""

    modes: ColabFoldModes  #: Databases that are searched, and rows that a complex gets

    @property
    def settings(self) -> Mapping[str, Any]:
        """Inputs of its alignments other than sequences, for :class:`~fastfold.data.search.store.SearchKey`."""

    def announce(
        self, sequences: Sequence[str], complexes: Sequence[Chains], say: Callable[[str], None]
    ) -> None:
        """Announce the searches for some sequences."""

    def unpaired(self, sequences: Sequence[str]) -> Iterator[tuple[str, Files | FastFoldError]]:
        """Search for each sequence; yields it with its files or an error once that is known.

        Raises:
            FastFoldError: The search fails for all sequences, or its result is not an alignment of them.
        """

    def paired(self, complexes: Sequence[Chains]) -> Iterator[tuple[Chains, list[str] | FastFoldError]]:
        """Pair chains; yield them with the A3M text of each, with paired rows, or with an error.

        Raises:
            FastFoldError: As for :meth:`unpaired`.
        """


def search_colabfold(
    targets: Iterable[Target],
    source: ColabFoldSource,
    out: Path,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> list[tuple[Target, InputError]]:
    """Make the missing alignments of targets in a folder, whose store keeps the results.

    Returns:
        Targets that the source failed on, with the error of each; nothing is written for them.

    Raises:
        OutputError: A file of the result's name exists that is not from a search.
        WriteError: The folder cannot be written.
        FastFoldError: The search fails; finished results are kept.
    """
    pair_mode = source.modes.pair_mode
    prepare_output_directory(out)
    jobs = (
        _SourceJob.make(target, pair_mode, find_needs(out, target, by_colabfold=True)) for target in targets
    )
    waiting = [job for job in jobs if job is not None]
    store = SearchStore(out / FOLDER)
    kinds = ("unpaired", "paired", "joined", "pairs")
    keys = {kind: SearchKey(NAME, {**source.settings, "kind": kind}) for kind in kinds}
    if pair_mode != "unpaired_paired":
        keys["joined"] = SearchKey(NAME, {**keys["joined"].settings, "pair_mode": pair_mode})
    sequences = list(dict.fromkeys(sequence for job in waiting for sequence in job.alone))
    complexes = list(dict.fromkeys(job.together for job in waiting if job.together))
    to_search = [sequence for sequence in sequences if store.find(sequence, keys["unpaired"]) is None]
    to_pair = [chains for chains in complexes if store.find(":".join(chains), keys["paired"]) is None]
    if to_search or to_pair:
        source.announce(to_search, to_pair, say)
    failed: dict[str | Chains, str] = {}
    for sequence, files_of_chain in source.unpaired(to_search) if to_search else ():
        if isinstance(files_of_chain, FastFoldError):
            failed[sequence] = str(files_of_chain)
            continue
        store.add(
            sequence, keys["unpaired"], files_of_chain, facts={"rows": files_of_chain[FILE].count(b">")}
        )
        waiting = [job for job in waiting if not _publish(job, store, keys, out)]
    to_pair = [chains for chains in to_pair if not set(chains) & set(failed)]
    for chains, texts in source.paired(to_pair) if to_pair else ():
        if isinstance(texts, FastFoldError):
            failed[chains] = str(texts)
            continue
        files = {f"{number}.a3m": text.encode("ascii") for number, text in enumerate(texts)}
        store.add(":".join(chains), keys["paired"], files, facts={"rows": texts[0].count(">")})
        waiting = [job for job in waiting if not _publish(job, store, keys, out)]
    failures: list[tuple[Target, InputError]] = []
    for job in waiting:
        if _publish(job, store, keys, out):
            continue
        record, chains = job.target.record, _chains(job.target)
        reason = next((failed[part] for part in (*chains, chains) if part in failed), None)
        if reason is None:
            raise InputError(
                "the search returned no alignment of its chains; run the same command again", record=record
            )
        failures.append((job.original, InputError(reason, record=record)))
    return failures


def _letters(target: Target) -> list[str]:
    return [chain.letters or chain.sequence for chain in target.chains]


def _chains(target: Target) -> Chains:
    """Return the different chains of a target."""
    return tuple(dict.fromkeys(_letters(target)))


class _SourceJob(NamedTuple):
    """Searches that a target needs."""

    original: Target  #: The target
    target: Target  #: The same with all residues of its proteins, which are searched for
    alone: Chains  #: Its chains that need an alignment of their own
    together: Chains  #: Its chains that are paired; empty for none
    is_joined: (
        bool  #: True to write one alignment of all chains, False to write one of each and one of the pairs
    )

    @classmethod
    def make(cls, requested: Target, pair_mode: PairMode, needs: SearchNeeds) -> _SourceJob | None:
        """Return the searches of a target under a pair mode; None if it needs none."""
        target = requested.uncut
        chains = _chains(target)
        missing = tuple(letters for letters in chains if mask_unknown(letters) in needs.own)
        pairs = needs.has_pairing(pair_mode)
        takes_pairs_alone = pair_mode == "paired" and target.is_complex
        if not (pairs if takes_pairs_alone and needs.is_hetero else missing):
            return None
        return cls(
            requested,
            target,
            alone=() if takes_pairs_alone else missing,
            together=chains if pairs else (),
            # Pairs that the folder has would be repeated in an alignment of all chains.
            is_joined=missing == chains and (pairs or pair_mode == "unpaired" or not needs.is_hetero),
        )


def template_file(chain: Chain) -> str:
    """Return the name of the file with a chain's template hits among its target's alignments."""
    return f"{NAME}_templates_{chain.id}.tar.gz"


def _publish(job: _SourceJob, store: SearchStore, keys: Mapping[str, SearchKey], out: Path) -> bool:
    """Put the alignment of a target into its place, if all of it has been found."""
    target, chains, letters = job.target, _chains(job.target), _letters(job.target)
    parts = {sequence: store.find(sequence, keys["unpaired"]) for sequence in job.alone}
    paired = store.find(":".join(job.together), keys["paired"]) if job.together else {}
    alone = {sequence: part for sequence, part in parts.items() if part is not None}
    if len(alone) < len(parts) or paired is None:
        return False
    templates = {
        template_file(chain): alone[sequence][TEMPLATES]
        for chain, sequence in zip(target.chains, letters, strict=True)
        if TEMPLATES in alone.get(sequence, ())
    }
    place, whole = out / target.name, ":".join(letters)
    if not target.is_complex:
        publish(place, keys["unpaired"], {FILE: alone[chains[0]][FILE], **templates})
        return True
    for sequence, folder in chain_places(target).items():
        if job.is_joined or sequence not in job.alone:
            withdraw(out / folder, NAME)
        else:
            publish(out / folder, keys["unpaired"], {FILE: alone[sequence][FILE]})
    copies = [letters.count(sequence) for sequence in chains]
    paired_texts = (
        [paired[f"{number}.a3m"].read_text("ascii") for number in range(len(chains))] if paired else None
    )
    if not job.is_joined:
        pairs: Mapping[str, Path] = {}
        if paired_texts is not None:
            text = join_complex(chains, copies, [], paired_texts)
            pairs = store.find(whole, keys["pairs"]) or store.add(
                whole, keys["pairs"], {PAIRS: text.encode("ascii")}
            )
        if pairs or templates:
            publish(place, keys["pairs"], {**pairs, **templates})
        else:
            withdraw(place, NAME)
        return True
    files = store.find(whole, keys["joined"])
    if files is None:
        text = join_complex(
            chains,
            copies,
            [alone[sequence][FILE].read_text("ascii") for sequence in job.alone],
            paired_texts,
        )
        files = store.add(whole, keys["joined"], {FILE: text.encode("ascii")})
    publish(place, keys["joined"], {**files, **templates})
    return True


FIRST_QUERY = 101  #: Name of the first query in ColabFold's numbering


def fasta_of(sequences: Sequence[str]) -> str:
    """Format queries as FASTA, named 101, 102 and so on."""
    return "".join(f">{FIRST_QUERY + i}\n{sequence}\n" for i, sequence in enumerate(sequences))


def split_queries(content: bytes, sequences: Sequence[str], *, origin: str) -> list[str]:
    """Split a file of several alignments into A3M texts; only the query's row if nothing was found.

    The content is A3M text with a NUL byte after each query's rows. The query is first and named by its number, from
    101 on in the order of the sequences. Errors name the ``origin``.

    Raises:
        InputError: A block is not the alignment of one of these queries.
    """
    texts = [""] * len(sequences)
    for block in content.split(b"\0"):
        text = block.decode("ascii", "replace").replace("\ufffd", "?").strip("\r\n")
        if not text:
            continue
        name = text[1:].split("\n", 1)[0].split()
        number = int(name[0]) - FIRST_QUERY if name and name[0].isdigit() and len(name[0]) < 7 else -1
        if not text.startswith(">") or not 0 <= number < len(sequences):
            raise InputError(
                f"expected the alignment of a query, found one that begins {text[:40]!r}", path=origin
            )
        if texts[number]:
            raise InputError(f"two alignments of query {name[0]}", path=origin)
        check_query(parse_a3m(text, path=origin), mask_unknown(sequences[number]), path=origin)
        texts[number] = text + "\n"
    return [text or f">{FIRST_QUERY + i}\n{sequences[i]}\n" for i, text in enumerate(texts)]


def join_complex(
    sequences: Sequence[str], copies: Sequence[int], unpaired: Sequence[str], paired: Sequence[str] | None
) -> str:
    """Format the alignment of a complex's different chains, in numbers of copies, as ColabFold does.

    ``unpaired`` has an A3M text of each chain, or is empty for paired rows alone. Rows of ``paired`` A3M texts belong
    together by their number; None is the query alone.

    Raises:
        InputError: The paired alignments have different numbers of rows.
    """
    lines = [",".join(str(len(s)) for s in sequences) + "\t" + ",".join(map(str, copies))]
    if paired is None:
        paired = [f">{FIRST_QUERY + i}\n{sequence}\n" for i, sequence in enumerate(sequences)]
    rows = [_rows(text) for text in paired]
    if len({len(of_chain) for of_chain in rows}) != 1:
        counts = ", ".join(str(len(of_chain)) for of_chain in rows)
        raise InputError(
            f"expected equal numbers of rows in the paired alignments of the chains, found {counts}"
        )
    for together in zip(*rows, strict=True):
        lines.append(">" + "\t".join(name for name, _ in together))
        lines.append("".join(letters for _, letters in together))
    before, after = 0, sum(map(len, sequences))
    for sequence, text in zip(sequences, unpaired, strict=True) if unpaired else ():
        after -= len(sequence)
        for name, letters in _rows(text):
            lines += [f">{name}", "-" * before + letters + "-" * after]
        before += len(sequence)
    return "#" + "\n".join(lines) + "\n"


def _rows(text: str) -> list[tuple[str, str]]:
    records, _ = a3m_records(text)
    return [(record.header, "".join(record.lines)) for record in records]
