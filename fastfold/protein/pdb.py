"""PDB files, written and read back (format version 3.3).

A PDB file has fixed columns. What does not fit into them raises :class:`PdbLimitError` instead of shifting
columns; the mmCIF file of the same structure has no such limits. Residues without atoms (unknown residues
have none in AlphaFold's tables) keep their place in SEQRES and their number in REMARK 465, as missing
residues of experimental structures do, and are read back from there.
"""

from __future__ import annotations

import bisect
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fastfold.errors import InputError, OutputError
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


@dataclass
class _Residue:
    """One residue while a file is read; ``atoms`` maps atom37 slots to (occupancy, x, y, z, B)."""

    name: str
    number: int
    atoms: dict[int, tuple[float, ...]] = field(default_factory=dict)


_MISSING = re.compile(r"REMARK 465.{4} ([A-Z0-9]{3}) (.) +(-?\d{1,5}) *$")


def from_pdb(text: str, *, path: str | os.PathLike[str] | None = None) -> Protein:
    """Reads the protein chains of a PDB file's first model.

    Of alternate locations the one with the highest occupancy is taken. HETATM records and atoms outside the
    atom37 table (hydrogens, for example) are left out, residues of other types become unknown (20) with the
    atoms they share with the table. Missing residues listed in REMARK 465 come back without atoms, placed by
    their number; chains are ordered as in SEQRES, then as in the ATOM records.

    Args:
        text: The file's contents.
        path: Where they came from, for messages.

    Returns:
        The structure; ``b_factors`` are those of the file.

    Raises:
        InputError: A malformed record, an atom given twice, an insertion code (each with its line), or no
            protein atom at all.
    """
    chains: dict[str, dict[int, _Residue]] = {}
    missing: list[tuple[str, _Residue]] = []
    for line_number, line in enumerate(text.split("\n"), start=1):
        record = line[:6].rstrip()
        if record == "ATOM":
            _read_atom(line.rstrip("\r"), chains, path, line_number)
        elif record == "SEQRES":
            chains.setdefault(line[11:12], {})
        elif match := _MISSING.match(line.rstrip("\r")):
            missing.append((match[2], _Residue(match[1], int(match[3]))))
        elif record == "ENDMDL":
            break

    # A residue without one known atom is no amino acid (a nucleotide, say), unless REMARK 465 lists it.
    kept = {letter: [r for r in residues.values() if r.atoms] for letter, residues in chains.items()}
    if not any(kept.values()):
        raise InputError("no protein atoms (ATOM records) found; is this a PDB file?", path=path)
    for letter, residue in missing:
        chain = chains.setdefault(letter, {})
        if chain.setdefault(residue.number, residue) is residue:
            bisect.insort(kept.setdefault(letter, []), residue, key=lambda other: other.number)
    return _assemble([residues for residues in kept.values() if residues])


def _read_atom(
    line: str,
    chains: dict[str, dict[int, _Residue]],
    path: str | os.PathLike[str] | None,
    line_number: int,
) -> None:
    """Adds the atom of one ATOM line to its chain and residue."""

    def fail(message: str) -> InputError:
        return InputError(message, path=path, line=line_number)

    try:
        number = int(line[22:26])
        values = [float(line[start : start + 8]) for start in (30, 38, 46)]
        occupancy = float(line[54:60].strip() or 1.0)
        values.append(float(line[60:66].strip() or 0.0))
    except ValueError:
        raise fail(f"ATOM record whose numbers do not stand in their columns: {line[:66]!r}") from None
    if not all(abs(value) < 1e8 for value in [*values, occupancy]):  # 1e39, inf and nan fit into columns too
        raise fail("ATOM record with a value that is not finite or too large")
    if line[26:27].strip():
        raise fail(f"residue {line[22:27].strip()} has an insertion code; renumber the residues without them")
    name, atom = line[17:20].strip(), line[12:16].strip()
    letter, alternate = line[21:22], line[16:17].strip()
    residue = chains.setdefault(letter, {}).setdefault(number, _Residue(name, number))
    if residue.name != name:
        if alternate:  # two amino acids share the place; the first one stands for both
            return
        raise fail(
            f"residue {number} of chain {letter!r} is {residue.name} before and {name} here; give each chain "
            "its own letter and each residue its own number"
        )
    slot = rc.atom_order.get(atom)
    if slot is None:
        return
    if slot in residue.atoms and not alternate:
        raise fail(
            f"atom {atom} of residue {number} of chain {letter!r} is given twice; give each chain its own letter"
        )
    if slot not in residue.atoms or occupancy > residue.atoms[slot][0]:
        residue.atoms[slot] = (occupancy, *values)


def _assemble(chains: list[list[_Residue]]) -> Protein:
    """Packs residues, chain by chain, into arrays."""
    residues = [residue for chain in chains for residue in chain]
    packed = np.zeros((len(residues), rc.atom_type_num, 5), np.float32)
    mask = np.zeros(packed.shape[:2], np.float32)
    for i, residue in enumerate(residues):
        slots = list(residue.atoms)
        if slots:
            packed[i, slots] = list(residue.atoms.values())
            mask[i, slots] = 1.0
    return Protein(
        atom_positions=packed[..., 1:4],
        atom_mask=mask,
        aatype=rc.sequence_to_aatype("".join(rc.restype_3to1.get(r.name, "X") for r in residues)),
        residue_index=np.array([r.number for r in residues], np.int32),
        chain_index=np.repeat(np.arange(len(chains), dtype=np.int32), [len(chain) for chain in chains]),
        b_factors=packed[..., 4],
    )
