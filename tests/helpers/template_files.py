"""Invented entries of the PDB and hits of searches, for the tests of templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fastfold.protein.residue_constants import resnames, restypes

NAMES = dict(zip(restypes, resnames[:20], strict=True)) | {"X": "UNK"}
QUERY = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRV"
"""Forty residues."""
HOMOLOGUE = "MKSAYIARQRNISFVKAHFTRQLEDRLGLVEVQAPILTKV"
"""Another forty, of which eight differ."""
FAMILY = (QUERY, HOMOLOGUE, QUERY.replace("S", "T"), HOMOLOGUE.replace("A", "S"), QUERY.replace("V", "I"))
_ATOMS = {"N": (0.0, 1.4, -0.5), "CA": (0.0, 0.0, 0.0), "C": (1.2, -0.7, 0.5), "O": (1.3, -1.9, 0.6)}


def position(residue: int, atom: str) -> tuple[float, float, float]:
    """An atom of residue number ``residue``, from 1, on a helix; to three decimals."""
    turn = np.deg2rad(100.0 * residue)
    dx, dy, dz = _ATOMS[atom]
    x, y, z = 2.3 * np.cos(turn) + dx, 2.3 * np.sin(turn) + dy, 1.5 * residue + dz
    return round(float(x), 3), round(float(y), 3), round(float(z), 3)


def entry(
    chains: Mapping[str, str],
    *,
    dates: Sequence[str] = ("2010-03-04",),
    missing: Sequence[int] = (),
    shift: Mapping[int, float] | None = None,
) -> str:
    """An mmCIF file.

    Args:
        chains: Letters by the author's name of the chain.
        dates: Its revisions.
        missing: Residues without atoms, from 1.
        shift: Å by which some residues lie aside, by their numbers.
    """
    lines = ["data_TEST", "#", "loop_", "_pdbx_audit_revision_history.ordinal"]
    lines += ["_pdbx_audit_revision_history.revision_date"]
    lines += [f"{number} {date}" for number, date in enumerate(dates, 1)]
    lines += ["#", "loop_", "_chem_comp.id", "_chem_comp.type"]
    lines += [f"{name} 'L-peptide linking'" for name in sorted(set(NAMES.values()))]
    lines += ["#", "loop_", "_entity_poly_seq.entity_id", "_entity_poly_seq.num", "_entity_poly_seq.mon_id"]
    for number, letters in enumerate(chains.values(), 1):
        lines += [f"{number} {place} {NAMES[letter]}" for place, letter in enumerate(letters, 1)]
    lines += ["#", "loop_", "_struct_asym.id", "_struct_asym.entity_id"]
    lines += [f"L{number} {number}" for number in range(1, len(chains) + 1)]
    lines += ["#", "loop_"]
    items = (
        "group_PDB",
        "label_atom_id",
        "label_alt_id",
        "label_comp_id",
        "label_asym_id",
        "label_entity_id",
    )
    items += (
        "label_seq_id",
        "pdbx_PDB_ins_code",
        "Cartn_x",
        "Cartn_y",
        "Cartn_z",
        "occupancy",
        "B_iso_or_equiv",
    )
    items += ("auth_seq_id", "auth_asym_id", "pdbx_PDB_model_num")
    lines += [f"_atom_site.{item}" for item in items]
    for number, (chain, letters) in enumerate(chains.items(), 1):
        for place, letter in enumerate(letters, 1):
            for atom in _ATOMS if place not in missing else ():
                x, y, z = position(place, atom)
                x += (shift or {}).get(place, 0.0)
                lines.append(
                    f"ATOM {atom} . {NAMES[letter]} L{number} {number} {place} ? {x:.3f} {y:.3f} {z:.3f} 1.00 20.00 "
                    f"{place + 10} {chain} 1"
                )
    return "\n".join([*lines, "#", ""])


def write_entries(folder: Path, entries: Mapping[str, str]) -> Path:
    """A folder of mmCIF files by PDB id."""
    folder.mkdir(parents=True, exist_ok=True)
    for pdb_id, text in entries.items():
        (folder / f"{pdb_id}.cif").write_text(text)
    return folder


def sto(rows: Mapping[str, str], kinds: Mapping[str, str] | None = None) -> str:
    """hmmsearch's alignment: rows by name, ``1abc_A/1-40`` for example."""
    lines = ["# STOCKHOLM 1.0", "#=GF AU hmmsearch (HMMER 3.3.2)", ""]
    for name in rows:
        lines.append(f"#=GS {name} DE [subseq from] mol:{(kinds or {}).get(name, 'protein')} length:40  TEST")
    lines += ["", *(f"{name} {row}" for name, row in rows.items()), "//", ""]
    return "\n".join(lines)


def hhr(hits: Sequence[tuple[str, str, str, float]], start: int = 1) -> str:
    """HHsearch's output.

    Args:
        hits: Of each its name, the query's row, the template's row, and the sum of probabilities.
        start: The first residue of both.
    """
    lines = [
        "Query         query",
        "Match_columns 40",
        "",
        " No Hit                             Prob E-value",
    ]
    for number, (name, mine, theirs, total) in enumerate(hits, 1):
        columns = sum("-" not in pair for pair in zip(mine, theirs, strict=True))
        lines += ["", f"No {number}", f">{name}"]
        lines.append(
            f"Probab=99.00  E-value=1e-20  Score=100.00  Aligned_cols={columns}  Identities=80%  Similarity=1.500  "
            f"Sum_probs={total}  Template_Neff=2.000"
        )
        for first in range(0, len(mine), 20):
            for mark, row in (("Q", mine), ("T", theirs)):
                before = start + sum(letter != "-" for letter in row[:first])
                here = row[first : first + 20]
                end = before + sum(letter != "-" for letter in here) - 1
                lines.append(f"{mark} {'name':<14} {before:5d} {here} {end:4d} (40)")
                lines.append(f"{mark} Consensus      {before:5d} {'~' * len(here)} {end:4d} (40)")
            lines.append("")
    return "\n".join([*lines, "", "Done!", ""])
