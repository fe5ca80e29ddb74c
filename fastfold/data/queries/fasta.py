"""FASTA files as queries.

A record is one target; ``:`` in its sequence joins the chains of a complex. Lines that begin with ``#`` are comments.
The records of an input of Boltz (``>A|protein|a.a3m``) or Chai (``>protein|name=a``) are the chains of one complex.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fastfold.data.msa.msa import FastaRecord, split_records
from fastfold.data.queries.jobs import Entity, QueryJob, complex_record
from fastfold.data.queries.named_alignments import entity_alignments
from fastfold.data.queries.records import QueryFile, Record, targets_of_records
from fastfold.data.targets import Target, parse_sequence, unique_targets
from fastfold.errors import InputError
from fastfold.utils.option_fields import check_path
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

MAX_FASTA_BYTES = 1 << 28

_OTHER_MOLECULES = ("ccd", "smiles", "dna", "rna", "ligand", "glycan")
"""Kinds of other molecules, in the second field of a header of Boltz and the first of Chai."""
_CHAIN = re.compile(
    r"(?P<id>[^|\s]+)\|protein(\|(?P<msa>empty|\S+\.(a3m|csv)(\.gz)?)?)?|protein\|name=.*", re.IGNORECASE
)
"""Header of a protein of Boltz, with its alignment, or of Chai."""
_PIR = re.compile(r"([A-Z][A-Z0-9]);(.*)")
_PIR_PROTEINS = ("P1", "F1")
_ALIGNMENT = re.compile(r"#[0-9]+(,[0-9]+)*[ \t]+[0-9]+(,[0-9]+)*[ \t]*$|# STOCKHOLM")
_INDENTED = re.compile(r"^[ \t]+>", re.MULTILINE)
_STRUCTURE = re.compile(
    r"(HEADER|TITLE|REMARK|CRYST1|MODEL|ATOM|HETATM|COMPND|EXPDTA) {1,6}\S|data_\S", re.ASCII
)
_QUOTED = re.compile(r"^[ \t]*[\"']+[ \t]*>", re.MULTILINE)


def read_fasta(path: PathLike, *, complex_: bool = False) -> list[Target]:
    r"""Read the targets of one FASTA file, with unique names.

    Args:
        path: Path of the file; with suffix ``.gz`` it may be compressed.
        complex_: Join all records to one complex, which has the file's name.

    Raises:
        ConfigError: The path is not one.
        InputError: A record is invalid; the first one, with its line.

    Example:
        >>> from pathlib import Path
        >>> from fastfold.data import read_fasta
        >>> _ = Path("pair.fasta").write_text(">pair a dimer\nMTYK:GSHM\n")
        >>> [(target.name, [chain.sequence for chain in target.chains]) for target in read_fasta("pair.fasta")]
        [('pair', ['MTYK', 'GSHM'])]
    """
    check_path(path)
    errors: list[InputError] = []
    file = QueryFile(path, read_text_bytes(path, limit=MAX_FASTA_BYTES))
    targets = unique_targets(targets_of_records(parse_fasta(file), file, errors, complex_=complex_), errors)
    if errors:
        raise errors[0]
    return targets


def parse_fasta(file: QueryFile, *, opens_files: bool = True) -> Iterator[Record | InputError]:
    """Yield each record of a FASTA file, or its error; an input of Boltz or Chai is one record.

    Args:
        file: The file.
        opens_files: Read the alignments that headers of Boltz name; False for texts that are not trusted.

    Raises:
        InputError: The file contains no record, or is an alignment.
    """
    # Surrogates keep bytes outside UTF-8 distinct until their line can be named.
    text = _INDENTED.sub(">", file.data.decode("utf-8", "surrogateescape"))
    if quoted := _QUOTED.search(text):
        line = len(split_lines(text[: quoted.start()]))
        message = "a quotation mark precedes '>'; remove the quotation marks around the record"
        raise InputError(message, path=file.path, line=line)
    preamble, records = split_records(text)
    stray = next((i for i, line in enumerate(preamble) if line.strip() and not line.startswith("#")), None)
    first = next((i for i, line in enumerate(preamble) if line.strip()), None)
    if first is not None and _ALIGNMENT.match(preamble[first]):
        remedy = (
            "rename it to .a3m to fold its query"
            if preamble[first][1].isdigit()
            else "name it after its query, as ID.sto, in a folder for `msa_dir`, and fold the query's FASTA"
        )
        message = f"this is an alignment, not FASTA; {remedy}"
        raise InputError(message, path=file.path, line=first + 1)
    if first is not None and _STRUCTURE.match(preamble[first]):
        message = (
            "this is a structure, not a sequence; 'fastfold score' scores it and 'fastfold relax' relaxes it. To fold "
            "a sequence with it, give the sequence here, and the structure as a template (`templates`) or as the start "
            "of a fold (`initial_guess`)"
        )
        raise InputError(message, path=file.path, line=first + 1)
    if stray is not None:
        message = "text without a header; put a line such as '>my_protein' above the sequence"
        yield InputError(message, path=file.path, line=stray + 1)
    elif not records:
        raise InputError("is empty; a FASTA file has a line '>name' and then the sequence", path=file.path)
    elif all(_CHAIN.fullmatch(record.header.strip()) for record in records):
        yield _chains(file, records, opens_files)
        return
    for number, record in enumerate(records, 1):
        try:
            yield _parse_record(file, number, record)
        except InputError as error:
            yield error


def _parse_record(file: QueryFile, number: int, record: FastaRecord) -> Record:
    pir = _PIR.fullmatch(record.header)
    words = (pir[2] if pir else record.header).split()
    identifier = words[0] if words else f"{file.stem}_{number}"
    _check_protein(record, pir[1] if pir else None, identifier, file.path)
    lines = ["" if line.startswith("#") else line for line in record.lines]
    if pir and lines:
        lines[0] = ""  # title line of PIR
    sequences, warnings = parse_sequence(lines, path=file.path, record=identifier, first_line=record.line + 1)
    if not words:
        warnings.insert(
            0, f"the header on line {record.line} lacks a name; the record is named {identifier!r}"
        )
    return Record(identifier, record.line, sequences, warnings, is_named=bool(words))


def _chains(file: QueryFile, records: Sequence[FastaRecord], opens_files: bool) -> Record | InputError:
    """Return the complex of an input of Boltz or Chai, which has the file's name, or its error."""
    job = QueryJob(file.path, file.stem, uses_working_folder=True)
    entities: list[Entity] = []
    doubts: list[str] = []
    try:
        for number, record in enumerate(records, 1):
            header = _CHAIN.fullmatch(record.header.strip())
            assert header is not None  # as of all records
            fields = header.groupdict("")
            chain = _parse_record(file, number, record)
            if len(chain.sequences) > 1:
                raise job.fail(
                    f"record {chain.identifier!r} has ':' in its sequence; give each chain a record"
                )
            if not opens_files and fields["msa"].lower() not in ("", "empty"):
                raise job.fail(
                    f"record {chain.identifier!r} names a file, which is not opened here; remove its name"
                )
            (sequence,) = chain.sequences
            alignments = entity_alignments(job, fields, sequence, number, is_protenix=False)
            entities.append(Entity(sequence, [fields["id"]], alignments))
            doubts += chain.warnings
        return complex_record(job, entities, warnings=doubts)._replace(is_named=False)
    except InputError as error:
        return error


def _check_protein(record: FastaRecord, pir: str | None, identifier: str, path: PathLike) -> None:
    fields = [field.strip().lower() for field in record.header.split("|")]
    kind = fields[1] if len(fields) > 1 else ""
    if kind.startswith("name="):
        kind = fields[0]
    if kind in _OTHER_MOLECULES:
        molecule = kind
    elif pir is not None and pir not in _PIR_PROTEINS:
        molecule = f"PIR type {pir}"
    else:
        return
    raise InputError(
        f"expected a protein, found a record of another molecule ({molecule}); FastFold folds only proteins: remove "
        "the record",
        path=path,
        line=record.line,
        record=identifier,
    )
