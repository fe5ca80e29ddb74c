"""Search for templates: hmmsearch in the PDB's sequences, hhsearch in a profile database such as PDB70.

Both start from the alignment of the chain's UniRef90 search without repeated rows, as in AlphaFold-Multimer and
AlphaFold.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastfold.data.msa.msa import Msa
from fastfold.data.msa.sampling import a3m_text
from fastfold.data.search.programs import find_program, search_profiles
from fastfold.data.templates.hits import parse_hmmsearch
from fastfold.errors import ConfigError, InputError
from fastfold.utils.packages import require_package
from fastfold.utils.text_files import PathLike

if TYPE_CHECKING:
    from pyhmmer.plan7 import HMM, Pipeline

_FILTER = 0.1  #: P-value up to which a sequence passes each of HMMER's three filters
_MAX_E_VALUE = 100.0  #: E-value up to which sequences and their domains are reported and included
_MAX_OWN_E_VALUE = 0.1  #: The same limit for a few sequences of the user; an unrelated one has about 1
_PART_BYTES = 16 << 20  #: Number of a database's sequences that are compared at a time
_HHM = "_hhm.ffdata"


def without_repeats(msa: Msa) -> list[int]:
    """Return the indices of rows that do not repeat an earlier one in the query's columns."""
    first = {row: index for index, row in reversed(list(enumerate(msa.sequences)))}
    return sorted(first.values())


def to_stockholm(msa: Msa) -> str:
    """Format an alignment for hmmbuild.

    The columns of the query are match states (``#=GC RF``). Inserted residues are written as ``x``, because a profile
    depends only on their number.
    """
    kept = without_repeats(msa)
    deletions = np.asarray(msa.deletions)[kept]
    widths = deletions.max(0)
    lines = ["# STOCKHOLM 1.0"]
    for number, (index, inserted) in enumerate(zip(kept, deletions, strict=True)):
        pieces = zip(msa.sequences[index], inserted, widths, strict=True)
        row = "".join("x" * count + "." * (width - count) + letter for letter, count, width in pieces)
        lines.append(f"row_{number} {row}")
    marks = "".join("." * width + "x" for width in widths)
    return "\n".join([*lines, f"#=GC RF {marks}", "//", ""])


def to_a3m(msa: Msa) -> str:
    """Format an alignment for hhsearch, the query first; inserted residues are written as ``x``."""
    rows = msa.take(without_repeats(msa))
    return a3m_text(replace(rows, descriptions=("query", *rows.descriptions[1:])), rows.sequences[0])


def hmmsearch(msa: Msa, database: PathLike, *, say: Callable[[str], None] = lambda line: None) -> str:
    """Search the PDB's sequences with the profile of an alignment, with AlphaFold-Multimer's settings.

    Nucleic acids that HMMER can read are compared too, because E-values depend on the number of records. Those that it
    cannot read are left out. The result is an alignment of all hits as written by hmmsearch with ``-A``
    (:mod:`fastfold.data.templates.hits`), empty without hits.

    Raises:
        InputError: The database, or all of its records, cannot be read.
    """
    require_package("pyhmmer", "a search for templates by hmmsearch")
    from fastfold.data.search.database import SkippedRecords, split_database
    from fastfold.data.search.hmmer import stockholm_text
    from fastfold.data.search.shard_pool import digitize_searchable

    profile = _profile(msa)
    path, found_in, skipped = Path(database), [], SkippedRecords()
    try:
        for (part,) in split_database(path, 1, _PART_BYTES, chunk_bytes=_PART_BYTES):
            sequences, left_out = digitize_searchable(part.read(), part, keep_others=True)
            skipped += left_out
            if sequences:
                found_in.append(_pipeline().search_hmm(profile, sequences))
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"cannot be searched for templates: {error}", path=database) from None
    if any(skipped):
        say(f"{path.name}: {skipped}")
    if not found_in:
        raise InputError("cannot be searched for templates: it contains no protein", path=database)
    hits = found_in[0].merge(*found_in[1:]) if len(found_in) > 1 else found_in[0]
    if not len(hits.included):
        return ""
    alignment = hits.to_msa(profile.alphabet, all_consensus_cols=True)
    alignment.name, alignment.author = "query", "hmmsearch"
    return stockholm_text(alignment).decode("utf-8", "replace")


def align_to_profile(msa: Msa, sequences: Sequence[str]) -> list[dict[int, int]]:
    """Return the places of the query's residues in each sequence, aligned with the profile of an alignment.

    These are places of the largest domain, and of others in the same order in both; empty for an unrelated sequence.
    Domains on both sides of an inserted one often overlap in the query; they meet where most letters are equal.
    """
    if not sequences:
        return []
    require_package("pyhmmer", "the alignment of user templates")
    from pyhmmer import easel

    from fastfold.data.search.hmmer import stockholm_text

    profile, pipeline = _profile(msa), _pipeline(filtered=False)
    names = [f"c_{i}" for i in range(len(sequences))]
    digitized = [
        easel.TextSequence(name=name, description="mol:protein", sequence=sequence).digitize(profile.alphabet)
        for name, sequence in zip(names, sequences, strict=True)
    ]
    hits = pipeline.search_hmm(profile, easel.DigitalSequenceBlock(profile.alphabet, digitized))
    domains: dict[str, list[dict[int, int]]] = {}
    if len(hits.included):
        text = stockholm_text(hits.to_msa(profile.alphabet, all_consensus_cols=True)).decode()
        for hit in parse_hmmsearch(text, msa.sequences[0]):
            pairs = zip(hit.indices_query, hit.indices_hit, strict=True)
            domains.setdefault(hit.name, []).append({mine: theirs for mine, theirs in pairs if theirs >= 0})
    query = msa.sequences[0]
    pairs_of_names = zip(names, sequences, strict=True)
    return [_collinear(domains.get(name, []), query, sequence) for name, sequence in pairs_of_names]


def _collinear(domains: Sequence[dict[int, int]], query: str, sequence: str) -> dict[int, int]:
    """Join the largest domain and those before or after it in both sequences.

    A domain that overlaps others in the query is joined if at least half of its equal letters add to theirs.
    """

    def equal(*parts: dict[int, int]) -> int:
        return sum(query[mine] == sequence[place] for part in parts for mine, place in part.items())

    joined: list[dict[int, int]] = []
    for domain in sorted(domains, key=len, reverse=True):
        parts = sorted([*joined, domain], key=min)
        for left, right in pairwise(range(len(parts))):
            first, second = parts[left], parts[right]
            if first and second and max(first) >= min(second):
                splits = [_split(first, second, column) for column in range(min(second), max(first) + 2)]
                parts[left], parts[right] = max(splits, key=lambda split: equal(*split))
        gain = equal(*parts) - equal(*joined)
        if all(parts) and all(starmap(_is_before, pairwise(parts))) and 2 * gain >= equal(domain):
            joined = parts
    return {mine: place for domain in joined for mine, place in domain.items()}


def _split(first: dict[int, int], second: dict[int, int], column: int) -> list[dict[int, int]]:
    """Return the part of a domain before a column of the query, and that of the next domain from there on."""
    before = {mine: place for mine, place in first.items() if mine < column}
    return [before, {mine: place for mine, place in second.items() if mine >= column}]


def _is_before(first: dict[int, int], second: dict[int, int]) -> bool:
    return max(first.values()) < min(second.values())


def _profile(msa: Msa) -> HMM:
    """Build the profile of an alignment, whose match states are the residues of the query."""
    from pyhmmer import easel, plan7

    alphabet = easel.Alphabet.amino()
    text = io.BytesIO(to_stockholm(msa).encode())
    with easel.MSAFile(text, "stockholm", digital=True, alphabet=alphabet) as file:
        aligned = file.read()
    assert aligned is not None
    aligned.name = "query"
    return plan7.Builder(alphabet, architecture="hand").build_msa(aligned, plan7.Background(alphabet))[0]


def _pipeline(*, filtered: bool = True) -> Pipeline:
    """Build hmmsearch's pipeline with AlphaFold-Multimer's settings, or without filters for a few sequences."""
    from pyhmmer import easel, plan7

    alphabet = easel.Alphabet.amino()
    share, limit = (_FILTER, _MAX_E_VALUE) if filtered else (1.0, _MAX_OWN_E_VALUE)
    bounds: dict[str, Any] = {
        **dict.fromkeys(("F1", "F2", "F3"), share),
        **dict.fromkeys(("E", "domE", "incE", "incdomE"), limit),
    }
    return plan7.Pipeline(alphabet, plan7.Background(alphabet), bias_filter=filtered, **bounds)


def is_profile_database(database: PathLike) -> bool:
    """Return True for the common prefix of an HH-suite database's files (``…/pdb70``)."""
    return Path(f"{database}{_HHM}").is_file()


def hhsearch(msa: Msa, databases: Sequence[PathLike]) -> str:
    """Search profile databases, by the common prefix of their files, with AlphaFold's settings.

    Raises:
        ConfigError: The program is missing.
        InputError: The program fails.
    """
    program = find_program("hhsearch")
    if program is None:
        raise ConfigError(
            "hhsearch is not installed: install HH-suite or the Python package colabfold-binaries, or search "
            "pdb_seqres.txt instead, for which FastFold needs no external program"
        )
    flags = ("-maxseq", "1000000", "-cpu", "1")
    return search_profiles(program, to_a3m(msa), databases, output="-o", flags=flags)
