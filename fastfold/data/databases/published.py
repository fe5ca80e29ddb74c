"""Databases that AlphaFold 2.3's scripts download, and those of them in a folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fastfold.errors import ConfigError, InputError

Kind = Literal["fasta", "archive", "file", "rsync"]
"""Packed FASTA, an archive of an HH-suite database, an unpacked file, or a tree of files."""

_GOOGLE = "https://storage.googleapis.com/alphafold-databases"
_UNIPROT = "https://ftp.ebi.ac.uk/pub/databases/uniprot"
_PDB = "https://files.wwpdb.org/pub/pdb"
_HHSUITE = "http://wwwuser.gwdg.de/~compbiol/data/hhsuite/databases/hhsuite_dbs/old-releases"
_RELEASE = f"{_UNIPROT}/current_release/knowledgebase/complete"

MMCIF_SOURCE = "rsync://rsync.rcsb.org:33444/ftp_data/structures/divided/mmCIF/"
MMCIF_FOLDER = "mmcif_files"


@dataclass(frozen=True)
class PublishedDatabase:
    """A database that can be downloaded."""

    name: str  #: AlphaFold's name, which is its folder's
    kind: Kind  #: Form in which it is published
    urls: tuple[str, ...]  #: Addresses. Several files of FASTA are joined to one.
    product: str  #: The FASTA file, or the common beginning of the names of an HH-suite database's files
    download_gb: float  #: Approximate size of the download, as AlphaFold's README states it
    unpacked_gb: float  #: Approximate size on the disk, from there too
    licence: str  #: Licence or terms
    use: str  #: Use in a fold


DATABASES = (
    PublishedDatabase(
        name="uniref90",
        kind="fasta",
        urls=(f"{_UNIPROT}/uniref/uniref90/uniref90.fasta.gz",),
        product="uniref90.fasta",
        download_gb=34,
        unpacked_gb=67,
        licence="CC BY 4.0",
        use="alignments",
    ),
    PublishedDatabase(
        name="mgnify",
        kind="fasta",
        urls=(f"{_GOOGLE}/v2.3/mgy_clusters_2022_05.fa.gz",),
        product="mgy_clusters_2022_05.fa",
        download_gb=67,
        unpacked_gb=120,
        licence="CC0 1.0",
        use="alignments",
    ),
    PublishedDatabase(
        name="small_bfd",
        kind="fasta",
        urls=(f"{_GOOGLE}/reduced_dbs/bfd-first_non_consensus_sequences.fasta.gz",),
        product="bfd-first_non_consensus_sequences.fasta",
        download_gb=9.6,
        unpacked_gb=17,
        licence="CC BY-SA 4.0",
        use="alignments, in place of bfd and uniref30",
    ),
    PublishedDatabase(
        name="bfd",
        kind="archive",
        urls=(f"{_GOOGLE}/casp14_versions/bfd_metaclust_clu_complete_id30_c90_final_seq.sorted_opt.tar.gz",),
        product="bfd_metaclust_clu_complete_id30_c90_final_seq.sorted_opt",
        download_gb=271.6,
        unpacked_gb=1800,
        licence="CC BY-SA 4.0",
        use="alignments (hhblits)",
    ),
    PublishedDatabase(
        name="uniref30",
        kind="archive",
        urls=(f"{_GOOGLE}/v2.3/UniRef30_2021_03.tar.gz",),
        product="UniRef30_2021_03",
        download_gb=52.5,
        unpacked_gb=206,
        licence="CC BY-SA 4.0",
        use="alignments (hhblits)",
    ),
    PublishedDatabase(
        name="uniprot",
        kind="fasta",
        urls=(f"{_RELEASE}/uniprot_trembl.fasta.gz", f"{_RELEASE}/uniprot_sprot.fasta.gz"),
        product="uniprot.fasta",
        download_gb=53,
        unpacked_gb=105,
        licence="CC BY 4.0",
        use="pairs of complexes",
    ),
    PublishedDatabase(
        name="pdb70",
        kind="archive",
        urls=(f"{_HHSUITE}/pdb70_from_mmcif_200401.tar.gz",),
        product="pdb70",
        download_gb=19.5,
        unpacked_gb=56,
        licence="terms of HH-suite's databases",
        use="templates (hhsearch)",
    ),
    PublishedDatabase(
        name="pdb_seqres",
        kind="file",
        urls=(f"{_PDB}/derived_data/pdb_seqres.txt",),
        product="pdb_seqres.txt",
        download_gb=0.2,
        unpacked_gb=0.2,
        licence="CC0 1.0",
        use="templates",
    ),
    PublishedDatabase(
        name="pdb_mmcif",
        kind="rsync",
        urls=(f"{_PDB}/data/status/obsolete.dat",),
        product=MMCIF_FOLDER,
        download_gb=43,
        unpacked_gb=43,
        licence="CC0 1.0",
        use="structures of templates (rsync)",
    ),
)
"""All databases, in the order of AlphaFold's options."""


def find_published(name: str) -> PublishedDatabase:
    """Return a database by its name.

    Raises:
        ConfigError: The name is unknown.
    """
    for database in DATABASES:
        if database.name == name:
            return database
    raise ConfigError(
        f"{name!r} is not a database of AlphaFold; give names of {', '.join(one.name for one in DATABASES)}"
    )


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
