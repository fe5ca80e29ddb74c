"""Searches for templates: hmmsearch in the PDB's sequences, hhsearch in a database of profiles such as PDB70.

Both start from the alignment of the chain's UniRef90 search, without rows that repeat another, as AlphaFold-Multimer
and AlphaFold have it.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastfold.data.msa.msa import Msa
from fastfold.errors import ConfigError, InputError
from fastfold.utils.text_files import PathLike

_FILTER = 0.1
"""P-value up to which a sequence passes each of HMMER's three filters."""
_MAX_E_VALUE = 100.0
"""E-value of sequences and of their domains up to which they are reported, and included."""
_HHM = "_hhm.ffdata"


def without_repeats(msa: Msa) -> list[int]:
    """Indices of the rows that do not repeat an earlier one in the query's columns."""
    first: dict[str, int] = {}
    for index, row in enumerate(msa.sequences):
        first.setdefault(row, index)
    return list(first.values())


def to_stockholm(msa: Msa) -> str:
    """An alignment as hmmbuild reads it.

    The columns of the query are match states (``#=GC RF``). An inserted residue is written as ``x``: a profile depends
    on how many there are, not on which.

    Args:
        msa: The alignment.

    Returns:
        Text in Stockholm format, each row in one line.
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
    """An alignment as hhsearch reads it, the query first; inserted residues are written as ``x``."""
    pieces = []
    for number, index in enumerate(without_repeats(msa)):
        row = zip(msa.sequences[index], msa.deletions[index], strict=True)
        letters = "".join("x" * int(count) + letter for letter, count in row)
        pieces.append(f">{msa.descriptions[index] if number else 'query'}\n{letters}\n")
    return "".join(pieces)


def hmmsearch(msa: Msa, database: PathLike) -> str:
    """Searches the PDB's sequences with the profile of an alignment, by AlphaFold-Multimer's settings.

    Args:
        msa: The alignment; its first row is the query.
        database: FASTA of the PDB's chains, with the headers of ``pdb_seqres.txt``; plain or with ``.gz``.

    Returns:
        The alignment of all hits that hmmsearch writes with ``-A`` (:mod:`fastfold.data.templates.hmmsearch_hits`);
        empty text if there is none.

    Raises:
        InputError: The database cannot be read.
    """
    from pyhmmer import easel, plan7

    alphabet = easel.Alphabet.amino()
    with easel.MSAFile(
        io.BytesIO(to_stockholm(msa).encode()), "stockholm", digital=True, alphabet=alphabet
    ) as file:
        aligned = file.read()
    assert aligned is not None
    aligned.name = "query"
    background = plan7.Background(alphabet)
    profile, _, _ = plan7.Builder(alphabet, architecture="hand").build_msa(aligned, background)
    pipeline = plan7.Pipeline(
        alphabet,
        background,
        F1=_FILTER,
        F2=_FILTER,
        F3=_FILTER,
        E=_MAX_E_VALUE,
        domE=_MAX_E_VALUE,
        incE=_MAX_E_VALUE,
        incdomE=_MAX_E_VALUE,
    )
    try:
        with easel.SequenceFile(str(database), "fasta", digital=True, alphabet=alphabet) as sequences:
            hits = pipeline.search_hmm(profile, sequences)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"cannot be searched for templates: {error}", path=database) from None
    if not len(hits.included):
        return ""
    found = hits.to_msa(alphabet, all_consensus_cols=True)
    found.name, found.author = "query", "hmmsearch"
    text = io.BytesIO()
    found.write(text, "stockholm")
    return text.getvalue().decode("utf-8", "replace")


def is_profile_database(database: PathLike) -> bool:
    """Whether this is the common beginning of the names of an HH-suite database's files (``…/pdb70``)."""
    return Path(f"{database}{_HHM}").is_file()


def find_hhsearch() -> str | None:
    """The hhsearch program: on the PATH, or of the Python package ``colabfold-binaries``; None if there is none."""
    found = shutil.which("hhsearch")
    if found is not None:
        return found
    try:
        from colabfold_binaries import binary_path
    except ImportError:
        return None
    try:
        return str(binary_path("hhsearch"))
    except OSError:
        return None


def hhsearch(msa: Msa, databases: Sequence[PathLike], *, program: str | None = None, threads: int = 1) -> str:
    """Searches databases of profiles, by AlphaFold's settings.

    Args:
        msa: The alignment; its first row is the query.
        databases: Each the common beginning of the names of a database's files.
        program: The program; by default :func:`find_hhsearch`.
        threads: Threads that it may use.

    Returns:
        Its output (:mod:`fastfold.data.templates.hhr`).

    Raises:
        ConfigError: There is no such program.
        InputError: It fails.
    """
    program = program or find_hhsearch()
    if program is None:
        raise ConfigError(
            "hhsearch is not installed: install HH-suite or the Python package colabfold-binaries, or search "
            "pdb_seqres.txt instead, for which FastFold needs no other program"
        )
    with tempfile.TemporaryDirectory() as folder:
        query, output = Path(folder) / "query.a3m", Path(folder) / "output.hhr"
        query.write_text(to_a3m(msa), encoding="utf-8")
        command = [program, "-i", str(query), "-o", str(output), "-maxseq", "1000000", "-cpu", str(threads)]
        for database in databases:
            command += ["-d", str(database)]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except OSError as error:
            raise InputError(f"cannot be run: {error.strerror or error}", path=program) from None
        if done.returncode or not output.is_file():
            said = done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise InputError(f"hhsearch failed with exit code {done.returncode}: {said}", path=databases[0])
        return output.read_text(encoding="utf-8", errors="replace")
