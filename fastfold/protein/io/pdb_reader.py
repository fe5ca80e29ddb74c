"""Records of PDB files (format version 3.3), parsed by their columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from fastfold.errors import InputError
from fastfold.protein.io.records import ATOM_NAMES, MAX_VALUE, WATERS, AtomRecord, FileRecords
from fastfold.utils.text_files import PathLike

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
"""First words of the lines of PDB files, old versions and predictions included."""

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_RESOLUTION = re.compile(r"REMARK   2 RESOLUTION\. +(\d{1,3}\.\d*) ")
_REVISION = re.compile(r"REVDAT +\d+ +(\d\d)-([A-Z]{3})-(\d\d)")
_MISSING = re.compile(r"REMARK 465.{4} ([A-Z0-9 ]{3}) (.) +(-?\d{1,5})[A-Z ]? *$")


def parse_pdb(lines: Sequence[str], *, path: PathLike) -> FileRecords:
    """Reads the first model of a PDB file.

    HETATM records behind their chain's TER record are ligands and left out, as are waters and atoms outside
    the atom37 table; everything else is kept as the file has it.

    Args:
        lines: The file's lines without their ends; the last one is empty if the file ends with a line end.
        path: The file, for messages.

    Raises:
        InputError: A malformed ATOM, HETATM or SEQRES record, an atom given twice, a file that stops in the
            middle of a record or of a model; each with its line.
    """
    found = FileRecords()
    ended: set[str] = set()
    dates: list[str] = []
    missing: dict[str, list[int]] = {}
    last_atom, width, in_model, complete = 0, 0, False, True
    for i, line in enumerate(lines):
        record = line[:6]
        if record in ("ATOM  ", "HETATM"):
            if line[17:20] in WATERS:
                found.waters += 1
            elif record == "ATOM  " or line[21:22] not in ended:
                _read_atom(line, found, path, i + 1)
            if i + 1 == len(lines) and len(line) < min(width, 78):
                raise InputError(
                    "the file stops within this line; download or copy it again", path=path, line=i + 1
                )
            last_atom, width = i + 1, len(line)
            continue
        record = record.rstrip()
        if record == "SEQRES":
            chain = found.chain(line[11:12].strip())
            chain.sequence = [*(chain.sequence or ()), *line[19:70].split()]
        elif record == "TER":
            # Some programs write TER alone; then it ends the chain of the atom before it.
            ended.add((line if len(line) > 21 or not last_atom else lines[last_atom - 1])[21:22])
        elif record == "MODRES":
            found.parents[line[12:15].strip()] = line[24:27].strip()
        elif record == "EXPDTA":
            found.method = " ".join(f"{found.method} {line[10:79]}".lower().split())
        elif record == "REMARK":
            if match := _MISSING.match(line):
                missing.setdefault(match[2].strip(), []).append(int(match[3]))
            elif match := _RESOLUTION.match(line):
                found.resolution = float(match[1])
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
                    found.warnings.append("The file has several models; the first one is read.")
                break
    if in_model and last_atom:
        raise InputError(
            "the file stops within a model (no ENDMDL record); download or copy it again",
            path=path,
            line=last_atom,
        )
    if not complete:
        found.warnings.append("The file has a HEADER but no END record; it may be truncated.")
    for chain_id, chain in found.chains.items():
        chain.missing = missing.get(chain_id, [])
    found.release_date = min(dates, default="")
    return found


def _read_atom(line: str, found: FileRecords, path: PathLike, line_number: int) -> None:
    """Adds the atom of one ATOM or HETATM line to its residue."""

    def fail(message: str) -> InputError:
        return InputError(message, path=path, line=line_number)

    try:
        number = int(line[22:26])
        x, y, z = float(line[30:38]), float(line[38:46]), float(line[46:54])
        occupancy = float(line[54:60].strip() or 1.0)
        b_factor = float(line[60:66].strip() or 0.0)
    except ValueError:
        raise fail(
            f"the numbers of this atom do not stand in the columns of a PDB file: {line[:66]!r}; write the file "
            "again with a program that keeps them, or use mmCIF"
        ) from None
    if not (
        -MAX_VALUE < x < MAX_VALUE
        and -MAX_VALUE < y < MAX_VALUE
        and -MAX_VALUE < z < MAX_VALUE
        and -MAX_VALUE < occupancy < MAX_VALUE
        and -MAX_VALUE < b_factor < MAX_VALUE
    ):
        raise fail("an atom with a value that is not finite or too large; correct or remove it")
    name = line[12:16].strip()
    if name not in ATOM_NAMES:
        return
    atom = AtomRecord(line[17:20].strip(), line[16:17].strip(), name, occupancy, x, y, z, b_factor)
    chain = found.chain(line[21:22].strip())
    if problem := chain.add_atom(atom, number, line[26:27].strip(), hetero=line[0] == "H"):
        raise fail(problem)
