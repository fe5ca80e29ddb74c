"""Hits of MMseqs2 as sources of templates (``.m8``), and a database of their chains for hhsearch, as in ColabFold.

A line has the query, the hit (``<PDB id>_<chain>``), and columns of BLAST's table. As in ColabFold's
``--pdb-hit-file``, the first 20 lines of each query name PDB entries, whose chains hhsearch then aligns with every
chain of the targets. Unlike there, obsolete entries are replaced by their successors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fastfold.data.search.colabfold.server_templates import MAX_HITS
from fastfold.data.templates.database import MmcifFolder
from fastfold.data.templates.hits import Outcome, TemplateSkipped
from fastfold.errors import InputError
from fastfold.protein.io.cif_tables import CifTable, read_cif_tables
from fastfold.protein.residue_constants import restype_3to1
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

_LIMIT = 1 << 28
_ENTRY_LIMIT = 1 << 30
_PDB_ID = re.compile(r"[0-9][A-Za-z0-9]{3}(?![A-Za-z0-9])", re.ASCII)
_FIRST_NUMBER = (
    1_000_000  #: Names of entries have equal lengths, so that their text order is that of the numbers
)


def read_hit_table(path: PathLike) -> list[str]:
    """Read the PDB ids of the first hits of each query, in lower case and without repetitions.

    Raises:
        InputError: The file cannot be read, has no hits, or a line is another one.
    """
    counts: dict[str, int] = {}
    ids: dict[str, None] = {}
    text = read_text_bytes(path, limit=_LIMIT).decode("utf-8", "replace")
    for number, line in enumerate(split_lines(text.replace("\0", "")), 1):
        if not line.strip():
            continue
        cells = line.split("\t")
        match = _PDB_ID.match(cells[1]) if len(cells) > 1 else None
        if match is None:
            raise InputError(
                "expected a line of MMseqs2's hits: the query, a tab, and a hit such as 1abc_A",
                path=path,
                line=number,
            )
        counts[cells[0]] = counts.get(cells[0], 0) + 1
        if counts[cells[0]] <= MAX_HITS:
            ids[match.group().lower()] = None
    if not ids:
        raise InputError(
            "contains no hits; search again, or leave it out to fold without templates", path=path
        )
    return list(ids)


def read_hit_chains(ids: Iterable[str], entries: MmcifFolder) -> tuple[dict[str, str], list[Outcome]]:
    """Return the letters of the entries' chains by ``<PDB id>_<chain>``, and an outcome for each entry left out.

    As in ColabFold, a chain has all residues of the author's chain that have coordinates, without those with insertion
    codes, and all but the twenty amino acids are ``X``, waters among them: hhsearch's numbers depend on the length.

    Raises:
        InputError: A disk or network failed.
    """
    chains: dict[str, str] = {}
    left_out: list[Outcome] = []
    for listed in ids:
        try:
            pdb_id = entries.current_id(listed)
            path = entries.path(pdb_id)
            letters = _chain_letters(read_text_bytes(path, limit=_ENTRY_LIMIT).decode("latin-1"), path)
        except TemplateSkipped as skipped:
            left_out.append(Outcome(listed, skipped.reason, str(skipped)))
        except InputError as error:
            if error.temporary:
                raise
            left_out.append(Outcome(listed, "unreadable", str(error)))
        else:
            chains |= {f"{pdb_id}_{chain_id}": row for chain_id, row in letters.items() if row.strip("X")}
    return chains, left_out


def _chain_letters(text: str, path: PathLike) -> dict[str, str]:
    """Return a letter for each residue of the first model with coordinates, by the author's chain."""
    blocks = read_cif_tables(split_lines(text), ("_atom_site",), path=path)
    table = next((block["_atom_site"] for block in blocks if "_atom_site" in block), CifTable())
    models = table.column("pdbx_pdb_model_num")
    items = ("auth_asym_id", "group_pdb", "auth_seq_id", "pdbx_pdb_ins_code", "label_comp_id")
    rows = zip(models, *(table.column(item) for item in items), strict=True)
    residues: dict[tuple[str, ...], str] = {}
    for model, *place, name in rows:
        if model == models[0] and not place[-1]:
            residues.setdefault(tuple(place), name)
    letters: dict[str, list[str]] = {}
    for (chain_id, *_), name in residues.items():
        letters.setdefault(chain_id, []).append(restype_3to1.get(name, "X"))
    return {chain_id: "".join(row) for chain_id, row in letters.items()}


def write_sequence_database(chains: dict[str, str], database: Path) -> None:
    """Write single sequences as a database for hhsearch, by the common beginning of its files' names."""
    data, index, offset = [], [], 0
    for number, (name, letters) in enumerate(chains.items(), _FIRST_NUMBER):
        text = f">{name}\n{letters}\n\0"
        data.append(text)
        index.append(f"{number}\t{offset}\t{len(text)}\n")
        offset += len(text)
    contents: Sequence[tuple[str, str]] = (
        ("a3m.ffdata", "".join(data)),
        ("a3m.ffindex", "".join(index)),
        # hhsearch opens these, but compares with all sequences, so that they may be empty.
        ("cs219.ffdata", ""),
        ("cs219.ffindex", "".join(index)),
    )
    for end, content in contents:
        database.with_name(f"{database.name}_{end}").write_text(content, "ascii")
