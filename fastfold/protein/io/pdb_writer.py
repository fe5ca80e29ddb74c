"""PDB files, written (format version 3.3).

A PDB file has fixed columns. What does not fit into them raises :class:`PdbLimitError` instead of shifting
columns; the mmCIF file of the same structure has no such limits. Residues without atoms (unknown residues
have none in AlphaFold's tables) keep their place in SEQRES and their number in REMARK 465, as missing
residues of experimental structures do.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import numpy as np

from fastfold.errors import OutputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import PDB_CHAIN_IDS, Protein, check_writable

_MAX_SERIAL = 99_999
_MAX_NUMBER, _MIN_NUMBER = 9_999, -999


class PdbLimitError(OutputError):
    """A sound structure that does not fit into the columns of a PDB file."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"a PDB file cannot hold this structure: {problem}; use its .cif file instead")


def to_pdb(protein: Protein, *, title: str | None = None) -> str:
    """Writes a structure as one model of a PDB file, the same bytes for the same structure.

    Args:
        protein: The structure. Chains are named A-Z, a-z, 0-9 in their order.
        title: Text of the TITLE records; characters outside printable ASCII become ``?``.

    Returns:
        The file's text in lines of 80 columns: TITLE, REMARK 465, SEQRES, MODEL, ATOM, TER, ENDMDL, END.

    Raises:
        OutputError: There are no atoms, or a value is not finite.
        PdbLimitError: More than 62 chains, 99,999 atoms and TER records, a chain longer than 9,999 residues,
            a residue number outside -999..9999, a coordinate outside -999.999..9999.999 Å, or a B-factor
            outside -99.99..999.99.
    """
    check_writable(protein)
    present = protein.atom_mask > 0.5
    # Rounded before formatting, plus zero: -0.0004 prints as 0.000, and limits hold for what is printed.
    xyz = np.round(protein.atom_positions[present].astype(np.float64), 3) + 0.0
    b_factors = np.round(protein.b_factors[present].astype(np.float64), 2) + 0.0
    _check_limits(protein, present, xyz, b_factors)

    lines = [*_title_lines(title), *_missing_residue_lines(protein, present), *_seqres_lines(protein)]
    lines.append("MODEL        1")
    residues, atoms = (indices.tolist() for indices in np.nonzero(present))
    heads = [
        f"{rc.resnames[aatype]} {PDB_CHAIN_IDS[chain]}{number:>4}"
        for aatype, chain, number in zip(
            protein.aatype.tolist(), protein.chain_index.tolist(), protein.residue_index.tolist(), strict=True
        )
    ]
    # All elements of the twenty amino acids have one letter: the first of the atom's name, in column 14.
    names = [(f" {name:<3} ", f"           {name[0]}") for name in rc.atom_types]
    chain_of = protein.chain_index.tolist()
    serial = 0
    for i, ((x, y, z), b) in enumerate(zip(xyz.tolist(), b_factors.tolist(), strict=True)):
        residue, (name, element) = residues[i], names[atoms[i]]
        serial += 1
        lines.append(
            f"ATOM  {serial:>5} {name}{heads[residue]}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00{b:6.2f}{element}"
        )
        if i + 1 == len(residues) or chain_of[residues[i + 1]] != chain_of[residue]:
            serial += 1
            lines.append(f"TER   {serial:>5}      {heads[residue]}")
    lines += ["ENDMDL", "END"]
    return "".join(f"{line:<80}\n" for line in lines)


def _check_limits(protein: Protein, present: np.ndarray, xyz: np.ndarray, b_factors: np.ndarray) -> None:
    chains = protein.chains
    if len(chains) > len(PDB_CHAIN_IDS):
        raise PdbLimitError(f"{len(chains)} chains, at most {len(PDB_CHAIN_IDS)} can be named")
    serials = len(xyz) + len(np.unique(protein.chain_index[present.any(1)]))
    if serials > _MAX_SERIAL:
        raise PdbLimitError(f"{serials:,} atom and TER records, at most {_MAX_SERIAL:,} can be numbered")
    longest = max(chain.stop - chain.start for chain in chains)
    if longest > _MAX_NUMBER:
        raise PdbLimitError(f"a chain of {longest:,} residues, at most {_MAX_NUMBER:,} fit")
    for extreme in (int(protein.residue_index.min()), int(protein.residue_index.max())):
        if not _MIN_NUMBER <= extreme <= _MAX_NUMBER:
            raise PdbLimitError(f"residue number {extreme}, only {_MIN_NUMBER} to {_MAX_NUMBER} fit")
    for extreme in (xyz.min(), xyz.max()):
        if not -999.999 <= extreme <= 9999.999:
            raise PdbLimitError(f"a coordinate of {extreme:.3f} Å, only -999.999 to 9999.999 fit")
    for extreme in (b_factors.min(), b_factors.max()):
        if not -99.99 <= extreme <= 999.99:
            raise PdbLimitError(f"a B-factor of {extreme:.2f}, only -99.99 to 999.99 fit")


def _title_lines(title: str | None) -> Iterator[str]:
    printable = re.sub(r"[^ -~]", "?", title or "")
    # 60 lines: the continuation field has two digits, and nobody reads further.
    for i, text in enumerate(textwrap.wrap(printable, 69)[:60], start=1):
        yield f"TITLE     {text}" if i == 1 else f"TITLE   {i:>2} {text}"


def _missing_residue_lines(protein: Protein, present: np.ndarray) -> Iterator[str]:
    missing = np.flatnonzero(~present.any(1))
    if len(missing):
        yield "REMARK 465"
        yield "REMARK 465 MISSING RESIDUES"
        yield "REMARK 465 THESE RESIDUES ARE PART OF THE SEQUENCE BUT HAVE NO ATOMS."
        yield "REMARK 465"
        yield "REMARK 465   M RES C SSSEQI"
    for i in missing:
        chain = PDB_CHAIN_IDS[protein.chain_index[i]]
        yield f"REMARK 465     {rc.resnames[protein.aatype[i]]} {chain} {protein.residue_index[i]:>5}"


def _seqres_lines(protein: Protein) -> Iterator[str]:
    for letter, chain in zip(PDB_CHAIN_IDS, protein.chains, strict=False):
        names = [rc.resnames[aatype] for aatype in protein.aatype[chain]]
        for row, start in enumerate(range(0, len(names), 13), start=1):
            yield f"SEQRES {row:>3} {letter} {len(names):>4}  {' '.join(names[start : start + 13])}"
