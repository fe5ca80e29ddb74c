"""Invented PDB records for the tests of the structure readers."""

from __future__ import annotations

from pathlib import Path

from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import Structure

BACKBONE = {"N": -1.3, "CA": 0.0, "C": 1.2, "O": 1.5}
"""Atoms of a residue and their x in Å; residues stand 3.8 Å apart, so that C and the next N are bonded."""


def atom_line(
    name: str,
    residue: str = "ALA",
    number: int | str = 1,
    x: float = 0.0,
    *,
    chain: str = "A",
    alternate: str = " ",
    insertion: str = " ",
    occupancy: float = 1.0,
    record: str = "ATOM",
    y: float = 0.0,
) -> str:
    """One ATOM or HETATM line."""
    of_chain = f"{residue:>3}{chain:>{5 - max(3, len(residue))}}"
    return (
        f"{record:<6}    1  {name:<3}{alternate}{of_chain}{number:>4}{insertion}   "
        f"{x:8.3f}{y:8.3f}{0.0:8.3f}{occupancy:6.2f}  9.00           {name[0]:<2}  "
    )


def residue_lines(residue: str, number: int | str, place: int, **options: object) -> list[str]:
    """The backbone of a residue at this place of a straight chain."""
    return [atom_line(name, residue, number, 3.8 * place + x, **options) for name, x in BACKBONE.items()]  # type: ignore[arg-type]


def chain_lines(
    *residues: tuple[str, int | str], breaks: tuple[int, ...] = (), **options: object
) -> list[str]:
    """Write backbones of residues (name, number), bonded in a row except before the places in ``breaks``."""
    lines: list[str] = []
    shift = 0
    for place, (name, number) in enumerate(residues):
        shift += 5 * (place in breaks)
        lines += residue_lines(name, number, place + shift, **options)
    return lines


def seqres_lines(*names: str, chain: str = "A") -> list[str]:
    """SEQRES records of a chain."""
    return [
        f"SEQRES {row:>3}{chain:>2} {len(names):>4}  {' '.join(f'{n:>3}' for n in names[start : start + 13])}"
        for row, start in enumerate(range(0, len(names), 13), start=1)
    ]


def read_lines(folder: Path, lines: list[str], *, end: str = "END\n") -> Structure:
    """What the reader makes of these lines as a PDB file."""
    path = folder / "x.pdb"
    path.write_text("".join(f"{line}\n" for line in lines) + end, encoding="latin-1")
    return read_structure(path)
