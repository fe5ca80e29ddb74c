"""Small folders of structures and alignments, made up: straight chains whose residues stand 3.8 Å apart."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from Bio.Data.IUPACData import protein_letters_1to3

ATOMS = {"N": (-1.2, 0.5), "CA": (0.0, 0.0), "C": (1.2, 0.5), "O": (1.3, 1.7)}


def pdb_text(chains: Mapping[str, str], *, b_factors: Mapping[int, float] | None = None) -> str:
    """A PDB file of chains by name; lower-case letters are residues without a CA."""
    lines = []
    serial = 0
    for chain_id, sequence in chains.items():
        for number, letter in enumerate(sequence, 1):
            for atom, (x, y) in ATOMS.items():
                if letter.islower() and atom == "CA":
                    continue
                serial += 1
                residue = protein_letters_1to3[letter.upper()].upper()
                b = (b_factors or {}).get(number, 90.0)
                lines.append(
                    f"ATOM  {serial:5d}  {atom:<3} {residue} {chain_id}{number:4d}    "
                    f"{3.8 * number + x:8.3f}{y:8.3f}{0.0:8.3f}{1.0:6.2f}{b:6.2f}          {atom[0]:>2}  "
                )
        lines.append("TER")
    return "\n".join([*lines, "END", ""])


def write(path: Path, text: str) -> Path:
    """Writes a text, packed if the name ends in ``.gz``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def a3m(sequence: str, *others: str) -> str:
    return "".join(f">row{i}\n{row}\n" for i, row in enumerate((sequence, *others)))


def alignment_database(folder: Path, chains: Mapping[str, Mapping[str, str]]) -> Path:
    """An alignment database of the files of chains; returns its index."""
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    with (folder / "alignments.db").open("wb") as file:
        for chain, files in chains.items():
            rows = []
            for name, text in files.items():
                rows.append([name, file.tell(), len(text.encode())])
                file.write(text.encode())
            index[chain] = {"db": "alignments.db", "files": rows}
    (folder / "alignments.index").write_text(json.dumps(index))
    return folder / "alignments.index"


def indexed_folder(root: Path) -> Path:
    """Layout ``folder`` with an index of two splits; one training chain has no structure file."""
    rows = [
        ("1aaa_A", "train", "A", "c1", "MKVLAAGIT"),
        ("1bbb_A", "train", "A", "c1", "GGGGGGGGGG"),
        ("1ccc_B", "train", "B", "c2", "MKVTTTQPES"),
        ("1ddd_A", "train", "A", "c3", "MKVTT"),
        ("2aaa_A", "valid", "A", "c4", "WWHHKKPPMM"),
    ]
    for name, split, chain, _, sequence in rows:
        if name != "1ddd_A":
            write(root / split / f"{name}.pdb.gz", pdb_text({chain: sequence}))
    write(root / "msas" / "1aaa_A.a3m.gz", a3m("MKVLAAGIT", "MKVLaaAAG--", "--VLAAGIT"))
    header = "name\tsplit\tchain\tcluster30\tsequence"
    write(root / "index.tsv", "\n".join([header, *map("\t".join, rows), ""]))
    return root


def openfold_folder(root: Path, cache: Mapping[str, Any] | None = None) -> Path:
    """Layout ``openfold``: two chains of one file with alignments, and a third chain without."""
    chains = {"A": "MKVLAAGIT", "B": "WWHHKKPPMM", "C": "MKVTTTQPES"}
    write(root / "mmcifs" / "1abc.pdb", pdb_text(chains))
    for chain_id in "AB":
        folder = root / "alignments" / f"1abc_{chain_id}"
        write(folder / "mgnify_hits.a3m", a3m(chains[chain_id], chains[chain_id].replace("K", "R")))
        write(folder / "uniref90_hits.a3m", a3m(chains[chain_id]))
        write(folder / "pdb70_hits.sto", "no alignment for the network")
    if cache is not None:
        write(root / "chain_data_cache.json", json.dumps(cache))
    return root
