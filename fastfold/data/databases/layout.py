"""Databases in a folder that AlphaFold's scripts or ``fastfold databases download`` filled."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fastfold.errors import InputError


@dataclass(frozen=True)
class FoundDatabases:
    """Databases of a folder."""

    sequences: tuple[str, ...]  #: Databases to search for alignments, as ``--db`` takes them
    template_database: Path | None  #: Database to search for templates; None if there is none
    mmcif_dir: Path | None  #: The PDB's mmCIF files; None if they are missing
    remarks: tuple[str, ...] = ()  #: Databases that are left out, with reasons


def find_databases(folder: Path) -> FoundDatabases:
    """Find AlphaFold's databases in a folder.

    BFD and UniRef30 are searched by hhblits if it is installed, else the small BFD. Templates come from
    ``pdb_seqres.txt``, which needs no program, or from PDB70. They need the PDB's mmCIF files.

    Raises:
        InputError: The folder has no database for alignments.
    """
    fasta = {
        name: _first(folder, patterns)
        for name, patterns in (
            ("uniref90", ("uniref90/uniref90*.fasta", "uniref90/uniref90*.fasta.gz")),
            ("mgnify", ("mgnify/mgy_clusters*.fa", "mgnify/mgy_clusters*.fa.gz")),
            ("small_bfd", ("small_bfd/bfd-first*.fasta", "small_bfd/bfd-first*.fasta.gz")),
            ("uniprot", ("uniprot/uniprot.fasta", "uniprot/uniprot.fasta.gz")),
        )
    }
    clusters = {name: _prefix(folder, name) for name in ("bfd", "uniref30")}
    remarks = []
    if any(clusters.values()):
        if not _has_hhblits() and fasta["small_bfd"] is not None:
            remarks.append(
                "bfd and uniref30 are left out, because hhblits is not installed; small_bfd is searched"
            )
            clusters = {}
        else:
            fasta["small_bfd"] = None
    named = {**fasta, **clusters}
    order = ("uniref90", "bfd", "uniref30", "small_bfd", "mgnify", "uniprot")
    sequences = tuple(f"{name}={path}" for name in order if (path := named.get(name)) is not None)
    if not any(not text.startswith("uniprot=") for text in sequences):
        raise InputError(
            "expected a folder with uniref90/uniref90.fasta, mgnify/… and so on, found no database for alignments; "
            "'fastfold databases download uniref90 mgnify small_bfd --dir DIR' fetches some",
            path=folder,
        )
    seqres, pdb70 = folder / "pdb_seqres" / "pdb_seqres.txt", folder / "pdb70" / "pdb70"
    template = seqres if seqres.is_file() else pdb70 if Path(f"{pdb70}_hhm.ffdata").is_file() else None
    mmcif = folder / "pdb_mmcif" / "mmcif_files"
    has_both = template is not None and mmcif.is_dir()
    if not has_both:
        remarks.append("no templates, which need pdb_mmcif with pdb_seqres or pdb70")
    return FoundDatabases(
        sequences, template if has_both else None, mmcif if has_both else None, tuple(remarks)
    )


def _first(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)


def _prefix(folder: Path, name: str) -> Path | None:
    """Return the common beginning of the names of a database's files."""
    end = "_cs219.ffdata"
    found = next(iter(sorted((folder / name).glob(f"*{end}"))), None)
    return None if found is None else found.with_name(found.name.removesuffix(end))


def _has_hhblits() -> bool:
    return shutil.which("hhblits") is not None or find_spec("colabfold_binaries") is not None
