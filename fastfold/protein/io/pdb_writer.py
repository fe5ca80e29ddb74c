"""Write PDB files (format version 3.3).

A PDB file has fixed columns. Values that do not fit raise :class:`PdbLimitError`; the mmCIF file of the same structure
has no such limits. Residues without atoms (such as unknown residues) keep their place in SEQRES and their number in
REMARK 465, like missing residues of experimental structures.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from fastfold.errors import OutputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.atom_rows import AtomRow, atom_rows
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import PDB_CHAIN_IDS, Hydrogens, Protein, check_writable
from fastfold.utils.transliteration import to_ascii

_MAX_SERIAL = 99_999
_MAX_NUMBER, _MIN_NUMBER = 9_999, -999


class PdbLimitError(OutputError):
    """Valid structure that does not fit into the columns of a PDB file."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"a PDB file cannot hold this structure: {problem}; use its .cif file instead")


def to_pdb(
    protein: Protein,
    *,
    title: str | None = None,
    hydrogens: Hydrogens | None = None,
    disulfides: Sequence[tuple[int, int]] = (),
    names: AuthorNames | None = None,
) -> str:
    """Write a structure as one model of a PDB file, with the same bytes for equal structures.

    Args:
        protein: The structure.
        title: Text of the TITLE records; letters outside ASCII are spelled.
        hydrogens: Hydrogens to write.
        disulfides: Indices of cysteines with bonded sulphurs.
        names: Names of chains and residues; by default chains are A-Z, a-z, 0-9 in order and residues are numbered by
            ``protein.residue_index``. Instead of a chain name of several characters, the first free letter is written,
            and a REMARK 999 record tells it.

    Returns:
        Text in lines of 80 columns: TITLE, REMARK 465 and 999, SEQRES, SSBOND, MODEL, ATOM, TER, ENDMDL, END.

    Raises:
        OutputError: The structure has no atoms, or a value is not finite.
        PdbLimitError: More than 62 chains, more than 99,999 atoms and TER records, a chain longer than 9,999 residues,
            a residue number outside -999..9999, a coordinate outside -999.999..9999.999 Å, or a B-factor outside
            -99.99..999.99.
    """
    check_writable(protein)
    present = protein.atom_mask > 0.5
    rows = atom_rows(protein, hydrogens)
    chain_ids = PDB_CHAIN_IDS if names is None else pdb_chain_ids(names.chain_ids)
    if (count := len(protein.chains)) > len(PDB_CHAIN_IDS):
        raise PdbLimitError(f"{count} chains, at most {len(PDB_CHAIN_IDS)} can be named")
    numbers = _numbers(protein, present, names)
    _check_limits(protein, numbers, rows)

    chain_of = protein.chain_index.tolist()
    heads = [  # columns 18 to 27
        None if number is None else f"{rc.resnames[aatype]} {chain_ids[chain]}{number[0]:>4}{number[1]:1}"
        for aatype, chain, number in zip(protein.aatype.tolist(), chain_of, numbers, strict=True)
    ]
    lines = [
        *_title_lines(title),
        *_missing_residue_lines(protein, chain_ids, numbers),
        *_renamed_chain_lines(chain_ids, names),
        *_seqres_lines(protein, chain_ids),
        *_ssbond_lines(protein, disulfides, chain_ids, numbers),
    ]
    lines.append("MODEL        1")
    serial = 0
    for i, (residue, name, x, y, z, b) in enumerate(rows):
        # All elements of the twenty amino acids have one letter, the first of the atom's name. It is in column 14,
        # except for names of four letters, which only hydrogens have.
        column = f"{name:<4}" if len(name) == 4 else f" {name:<3}"
        serial += 1
        lines.append(
            f"ATOM  {serial:>5} {column} {heads[residue]}   {x:8.3f}{y:8.3f}{z:8.3f}  1.00{b:6.2f}           {name[0]}"
        )
        if i + 1 == len(rows) or chain_of[rows[i + 1].residue] != chain_of[residue]:
            serial += 1
            lines.append(f"TER   {serial:>5}      {heads[residue]}")
    lines += ["ENDMDL", "END"]
    return "".join(f"{line:<80}\n" for line in lines)


def pdb_chain_ids(names: Sequence[str]) -> list[str]:
    """Return the names of chains in a PDB file: one character each, the first free letter instead of a longer name.

    An empty name is a space. Names are missing if there are more than 62.

    Example:
        >>> from fastfold.protein.io.pdb_writer import pdb_chain_ids
        >>> pdb_chain_ids(["A", "AAA", "C"])
        ['A', 'B', 'C']
    """
    free = iter(sorted(set(PDB_CHAIN_IDS) - set(names), key=PDB_CHAIN_IDS.index))
    return [(name or " ") if re.fullmatch("[!-~]?", name) else next(free, "") for name in names]


def _renamed_chain_lines(chain_ids: Sequence[str], names: AuthorNames | None) -> Iterator[str]:
    for letter, name in zip(chain_ids, () if names is None else names.chain_ids, strict=False):
        if name not in ("", letter):
            shown = re.sub(r"[^!-~]", "?", name)[:30]
            yield f"REMARK 999 CHAIN {letter} IS CHAIN {shown} OF THE MMCIF FILE"


def _numbers(
    protein: Protein, present: np.ndarray, names: AuthorNames | None
) -> list[tuple[int, str] | None]:
    """Return number and insertion code of each residue; None for a missing residue without a number."""
    if names is None:
        return [(number, "") for number in protein.residue_index.tolist()]
    here: list[bool] = np.any(present, axis=1).tolist()
    return [names.split_number(i) if there or names.numbers[i] else None for i, there in enumerate(here)]


def _check_limits(
    protein: Protein, numbers: Sequence[tuple[int, str] | None], rows: Sequence[AtomRow]
) -> None:
    chains = protein.chains
    chain_of = protein.chain_index.tolist()
    serials = len(rows) + len({chain_of[row.residue] for row in rows})
    if serials > _MAX_SERIAL:
        raise PdbLimitError(f"{serials:,} atom and TER records, at most {_MAX_SERIAL:,} can be numbered")
    longest = max(chain.stop - chain.start for chain in chains)
    if longest > _MAX_NUMBER:
        raise PdbLimitError(f"a chain of {longest:,} residues, at most {_MAX_NUMBER:,} fit")
    known = [number[0] for number in numbers if number is not None]
    values = np.array([row[2:] for row in rows])
    for text, column, low, high in (
        ("residue number {}", np.array(known), _MIN_NUMBER, _MAX_NUMBER),
        ("a coordinate of {:.3f} Å", values[:, :3], -999.999, 9999.999),
        ("a B-factor of {:.2f}", values[:, 3], -99.99, 999.99),
    ):
        for extreme in (column.min(), column.max()):
            if not low <= extreme <= high:
                raise PdbLimitError(f"{text.format(extreme)}, only {low} to {high} fit")


def _ssbond_lines(
    protein: Protein,
    disulfides: Sequence[tuple[int, int]],
    chain_ids: Sequence[str],
    numbers: Sequence[tuple[int, str] | None],
) -> Iterator[str]:
    sulphur = rc.atom_order["SG"]
    for serial, pair in enumerate(disulfides, start=1):
        ends = [
            f"CYS {chain_ids[protein.chain_index[i]]} {number[0]:>4}{number[1]:1}"
            for i in pair
            if (number := numbers[i]) is not None
        ]
        length = np.linalg.norm(np.subtract(*protein.atom_positions[list(pair), sulphur].astype(np.float64)))
        # The serial number has three columns.
        yield f"SSBOND {serial % 1000:>3} {ends[0]}   {ends[1]}{'':23}{'1555':>6} {'1555':>6} {length:5.2f}"


def _title_lines(title: str | None) -> Iterator[str]:
    printable = re.sub(r"[^ -~]", "?", to_ascii(title or ""))
    # 60 lines, because the continuation field has two digits.
    for i, text in enumerate(textwrap.wrap(printable, 69)[:60], start=1):
        yield f"TITLE     {text}" if i == 1 else f"TITLE   {i:>2} {text}"


def _missing_residue_lines(
    protein: Protein, chain_ids: Sequence[str], numbers: Sequence[tuple[int, str] | None]
) -> Iterator[str]:
    missing = np.flatnonzero(~(protein.atom_mask > 0.5).any(1)).tolist()
    known = [(i, number) for i in missing if (number := numbers[i]) is not None]
    if known:
        yield "REMARK 465"
        yield "REMARK 465 MISSING RESIDUES"
        yield "REMARK 465 THESE RESIDUES OF THE SEQUENCE ARE WITHOUT ATOMS."
        yield "REMARK 465"
        yield "REMARK 465   M RES C SSSEQI"
    for i, (number, insertion) in known:
        chain = chain_ids[protein.chain_index[i]]
        yield f"REMARK 465     {rc.resnames[protein.aatype[i]]} {chain} {number:>5}{insertion}"


def _seqres_lines(protein: Protein, chain_ids: Sequence[str]) -> Iterator[str]:
    for letter, chain in zip(chain_ids, protein.chains, strict=False):
        names = [rc.resnames[aatype] for aatype in protein.aatype[chain]]
        for row, start in enumerate(range(0, len(names), 13), start=1):
            yield f"SEQRES {row:>3} {letter} {len(names):>4}  {' '.join(names[start : start + 13])}"
