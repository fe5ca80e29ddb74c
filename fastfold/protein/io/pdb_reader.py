"""Read records of PDB files (format version 3.3) by their columns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count, groupby
from typing import Final, NamedTuple

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.records import (
    MAX_VALUE,
    TERMINAL_OXYGENS,
    WATERS,
    AtomRecord,
    FileRecords,
    RecordedChain,
    is_hydrogen,
)
from fastfold.protein.protein import chain_name
from fastfold.utils.foreign_text import plain_float, plain_int
from fastfold.utils.text_files import PathLike

_HYBRID = re.compile(r"[A-Z][0-9A-Z]{3}|[a-z][0-9a-z]{3}")
_ATOMS = ("ATOM  ", "HETATM")
_MOST_LONG_NAMES = 4
"""Largest number of different long names in a row; with more, column 21 belongs to the chain name."""


class ResidueId(NamedTuple):
    """Residue name, chain name, residue number and insertion code."""

    name: str
    chain_id: str
    number: int
    insertion: str


def residue_id(line: str, long_names: frozenset[str]) -> ResidueId:
    """Read columns 18 to 27 of an ATOM, HETATM or TER record.

    ``long_names`` are those of :func:`find_long_names`.

    Raises:
        ValueError: The residue number is not a number.
    """
    columns = line[17:27]
    return _decode(columns, 4 if columns in long_names else 3)


@lru_cache(maxsize=64)  # consecutive atoms share a residue
def _decode(columns: str, name_length: int) -> ResidueId:
    name, chain_id = columns[:name_length].strip(), columns[name_length:5].strip()
    number, insertion = columns[5:9], columns[9:].strip()
    if insertion.isdigit() and number.isdigit():  # 10000 and more, written over the insertion code
        number, insertion = number + insertion, ""
    return ResidueId(name, chain_id, _decode_number(number), insertion)


def chain_id_of(line: str, long_names: frozenset[str]) -> str:
    """Read the chain name of an ATOM, HETATM or TER record, of one or two letters."""
    return line[21:22].strip() if line[17:27] in long_names else line[20:22].strip()


def segment_of(line: str) -> str:
    """Read CHARMM's segment name in columns 73 to 76; empty if they hold an element or a charge."""
    segment = line[72:76].strip()
    is_name = segment.isalnum() and not segment.isdigit() and segment != line[12:16].strip()[:1]
    return segment if is_name else ""


def _decode_number(text: str) -> int:
    """Decode a residue number, which is in hybrid-36 beyond 9999."""
    if text[:1].isalpha() and _HYBRID.fullmatch(text):
        return int(text, 36) + 10_000 + (16 if text[0].islower() else -10) * 36**3
    return plain_int(text)


def find_long_names(lines: Sequence[str]) -> frozenset[str]:
    """Return columns 18 to 27 of residues with names of four letters, which use column 21.

    ``ARGAA`` is ARG of chain AA (ChimeraX), and ``NARGA`` is NARG of chain A (Amber). ``HISEA`` is HISE of chain A
    (GROMACS) if its number follows a residue of chain A.
    """
    if not any(line[20:21].strip() and line.startswith(_ATOMS) for line in lines):
        return frozenset()
    segments: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("TER"):
            segments.append([])
        elif line.startswith(_ATOMS) and segments[-1][-1:] != [line[17:27]]:
            segments[-1].append(line[17:27])
    long_names: set[str] = set()
    for residues in segments:
        residues = [residue for residue in residues if residue[:3] not in WATERS]
        if any(residue[3:4].strip() for residue in residues):
            long_names.update(residue for residue in residues if _has_terminal_name(residue))
            _follow(residues, +1, long_names)
            _follow(residues[::-1], -1, long_names)
    return frozenset(residue for residue in long_names if residue[3:4].strip())


def _has_terminal_name(residue: str) -> bool:
    """Return True if the name is Amber's for a residue at an end of a chain."""
    name = residue[:4].upper()
    return name[:1] in "NC" and name[1:] in rc.restype_3to1 and name[:3] not in rc.restype_3to1


def _follow(residues: Sequence[str], step: int, long_names: set[str]) -> None:
    """Add runs of long names that continue the numbers of a chain with a one-letter name."""
    last = ""
    for letters, run in groupby(residues, key=lambda residue: residue[3:5]):
        members = list(run)
        names = {residue[:3] for residue in members}
        if last[4:5] == letters[1:] and _counts_on(last, members[0], step) and len(names) <= _MOST_LONG_NAMES:
            long_names.update(members)
        last = members[-1] if letters.startswith(" ") or members[-1] in long_names else ""


def _counts_on(before: str, after: str, step: int) -> bool:
    try:
        return _decode_number(after[5:9]) - _decode_number(before[5:9]) == step
    except ValueError:
        return False


RECORD_NAMES: Final = frozenset(
    re.findall(
        r"\w+",
        "HEADER OBSLTE TITLE SPLIT CAVEAT COMPND SOURCE KEYWDS EXPDTA NUMMDL MDLTYP AUTHOR REVDAT "
        "SPRSDE JRNL REMARK DBREF DBREF1 DBREF2 SEQADV SEQRES MODRES HET HETNAM HETSYN FORMUL HELIX "
        "SHEET SSBOND LINK CISPEP SITE CRYST1 ORIGX1 ORIGX2 ORIGX3 SCALE1 SCALE2 SCALE3 MTRIX1 MTRIX2 "
        "MTRIX3 MODEL ATOM ANISOU TER HETATM ENDMDL CONECT MASTER END PARENT PFRMAT TARGET METHOD "
        "TURN USER SIGATM SIGUIJ",
    )
)
"""First words of the lines of PDB files, including old versions and predictions."""

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_RESOLUTION = re.compile(r"REMARK   2 RESOLUTION\. +(\d{1,3}\.\d*) ")
_REVISION = re.compile(r"REVDAT +\d+ +(\d\d)-([A-Z]{3})-(\d\d)")
_MISSING = re.compile(r"REMARK 465.{4} ([A-Z0-9 ]{3})(..) +(-?\d{1,5})[A-Z ]? *$")


def parse_pdb(lines: Sequence[str], *, path: PathLike) -> FileRecords:
    """Read the first model of a PDB file.

    HETATM records after the last TER record of their chain are ligands and are left out, as are waters and atoms
    outside the atom37 table. ATOM records after TER, or of another segment, begin a new chain, unless SEQRES, a peptide
    bond or a gap in the numbers shows that the chain continues.

    Lines are without line ends; the last one is empty if the file ends with a line end. The path is that of messages.

    Raises:
        InputError: An ATOM, HETATM or SEQRES record is malformed, an atom is repeated, or the file ends within a record
            or a model; with its line.
    """
    records = FileRecords()
    long_names = find_long_names(lines)
    parts: dict[str, list[RecordedChain]] = {}
    behind_ter: dict[str, list[int]] = {}
    dates: list[str] = []
    missing: dict[str, list[int]] = {}
    last_atom, width, in_model, complete = 0, 0, False, True
    for i, line in enumerate(lines):
        record = line[:6]
        if record in ("ATOM  ", "HETATM"):
            chain_id = chain_id_of(line, long_names)
            if record == "HETATM":
                records.hetero.add(line[17:20].strip())
            if line[17:20] in WATERS:
                records.waters += 1
            elif record == "HETATM" and chain_id in behind_ter:
                behind_ter[chain_id].append(i)
            else:
                chain = parts[chain_id][-1] if chain_id in parts else records.chain(chain_id)
                segment = chain.segment
                if record == "ATOM  " and line[72:76].strip() not in ("", segment):
                    segment = segment_of(line) or segment
                if chain_id in behind_ter or (chain.segment and segment != chain.segment):
                    chain = RecordedChain(chain_id)
                    parts.setdefault(chain_id, []).append(chain)
                chain.segment = segment
                for k in (*behind_ter.pop(chain_id, ()), i):
                    _read_atom(lines[k], chain, long_names, path, k + 1)
            if i + 1 == len(lines) and len(line) < min(width, 78):
                raise InputError(
                    "the file ends within this line; download or copy it again", path=path, line=i + 1
                )
            last_atom, width = i + 1, len(line)
            continue
        record = record.rstrip()
        if record == "SEQRES":
            chain = records.chain(line[10:12].strip())
            chain.sequence = [*(chain.sequence or ()), *line[19:70].split()]
        elif record == "TER":
            # Some programs write TER without fields; it ends the chain of the preceding atom.
            named = line if len(line) > 21 or not last_atom else lines[last_atom - 1]
            behind_ter.setdefault(chain_id_of(named, long_names), [])
        elif record == "MODRES":
            records.parents[line[12:15].strip()] = line[24:27].strip()
        elif record == "EXPDTA":
            records.method = " ".join(f"{records.method} {line[10:79]}".lower().split())
        elif record == "REMARK":
            if match := _MISSING.match(line):
                missing.setdefault(match[2].strip(), []).append(int(match[3]))
            elif match := _RESOLUTION.match(line):
                records.resolution = float(match[1])
        elif record == "REVDAT":
            if (match := _REVISION.match(line)) and match[2] in _MONTHS:
                year = int(match[3])
                century = 1900 if year > 70 else 2000  # the first entries are of 1971
                dates.append(f"{century + year}-{_MONTHS.index(match[2]) + 1:02}-{match[1]}")
        elif record == "HEADER":
            complete = False
        elif record == "MODEL":
            in_model = True
        elif record in ("ENDMDL", "END"):
            in_model, complete = False, True
            if last_atom:
                if any(other.startswith(("MODEL ", "ATOM  ")) for other in lines[i + 1 :]):
                    records.warnings.append(
                        "The file has several models, or atoms after END; the first part is read."
                    )
                break
    if in_model and last_atom:
        raise InputError(
            "the file ends within a model (no ENDMDL record); download or copy it again",
            path=path,
            line=last_atom,
        )
    if not complete:
        records.warnings.append("The file has a HEADER but no END record; it may be truncated.")
    for chain_id, chain in records.chains.items():
        chain.missing = missing.get(chain_id, [])
    _join_parts(records, parts)
    records.release_date = min(dates, default="")
    return records


def _read_atom(
    line: str, chain: RecordedChain, long_names: frozenset[str], path: PathLike, line_number: int
) -> None:
    def fail(message: str) -> InputError:
        return InputError(message, path=path, line=line_number)

    try:
        residue = residue_id(line, long_names)
        x, y, z = plain_float(line[30:38]), plain_float(line[38:46]), plain_float(line[46:54])
        occupancy = plain_float(line[54:60].strip() or "1")
        b_factor = plain_float(line[60:66].strip() or "0")
    except ValueError:
        raise fail(
            f"the numbers of this atom are not in the columns of a PDB file: {line[:66]!r}; write the file again with "
            "a program that keeps the columns, or use mmCIF"
        ) from None
    if not (
        -MAX_VALUE < x < MAX_VALUE
        and -MAX_VALUE < y < MAX_VALUE
        and -MAX_VALUE < z < MAX_VALUE
        and -MAX_VALUE < occupancy < MAX_VALUE
        and -MAX_VALUE < b_factor < MAX_VALUE
    ):
        raise fail("a value of an atom is not finite or too large; correct or remove it")
    name = line[12:16].strip()
    if is_hydrogen(name):
        return
    atom = AtomRecord(residue.name, line[16:17].strip(), name, occupancy, x, y, z, b_factor)
    if problem := chain.add_atom(atom, residue.number, residue.insertion, hetero=line[0] == "H"):
        raise fail(problem)


def _join_parts(records: FileRecords, parts: Mapping[str, Sequence[RecordedChain]]) -> None:
    """Join each later part of a chain to the first, or give it an unused name."""
    for chain_id, later in parts.items():
        chain = records.chains[chain_id]
        new_names = []
        for part in later:
            goes_on = chain.sequence is not None or _goes_on(chain, part)
            if goes_on and chain.residues.keys().isdisjoint(part.residues):
                if chain.sequence is None:
                    number = next(iter(part.residues.values())).number
                    records.warnings.append(
                        f"Chain {chain_id!r} continues after its TER record, at residue {number}."
                    )
                chain.residues.update(part.residues)
            else:
                part.chain_id = next(n for n in map(chain_name, count()) if n not in records.chains)
                chain = records.chains[part.chain_id] = part
                new_names.append(repr(part.chain_id))
        if new_names:
            records.warnings.append(
                f"Several molecules are named chain {chain_id!r}, with different TER records or segments; those after "
                f"the first are read as {', '.join(new_names)}."
            )


def _goes_on(chain: RecordedChain, part: RecordedChain) -> bool:
    """Return True if a part is bonded to its chain, or follows a gap that its numbers explain."""
    before, after = list(chain.residues.values())[-1], next(iter(part.residues.values()))
    atoms = {atom.name: (atom.x, atom.y, atom.z) for atom in before.atoms}
    nitrogen = next(((atom.x, atom.y, atom.z) for atom in after.atoms if atom.name == "N"), None)
    distance = math.dist(atoms["C"], nitrogen) if nitrogen and "C" in atoms else 2.0
    if distance < 2.0:
        return True
    step = after.number - before.number
    if before.is_nucleotide != after.is_nucleotide or chain.segment != part.segment:
        return False
    is_open = atoms.keys().isdisjoint(("OXT", *TERMINAL_OXYGENS))
    return is_open and step > 1 and distance < rc.ca_ca_distance * step
