"""Databases that AlphaFold 2.3's scripts download, and those of them in a folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast

from fastfold.errors import ConfigError, InputError

Kind = Literal["fasta", "archive", "file", "rsync"]
"""Packed FASTA, an archive of an HH-suite database, an unpacked file, or a tree of files."""

_GOOGLE = "https://storage.googleapis.com/alphafold-databases"
_UNIPROT = "https://ftp.ebi.ac.uk/pub/databases/uniprot"
_PDB = "https://files.wwpdb.org/pub/pdb"
_HHSUITE = "http://wwwuser.gwdg.de/~compbiol/data/hhsuite/databases/hhsuite_dbs/old-releases"
_BFD = "bfd_metaclust_clu_complete_id30_c90_final_seq.sorted_opt"
_RELEASE = f"{_UNIPROT}/current_release/knowledgebase/complete"

MMCIF_SOURCE = "rsync://rsync.rcsb.org:33444/ftp_data/structures/divided/mmCIF/"
MMCIF_FOLDER = "mmcif_files"


@dataclass(frozen=True)
class PublishedDatabase:
    """A database that can be downloaded."""

    name: str  #: AlphaFold's name, which is its folder's
    kind: Kind  #: Form in which it is published
    download_gb: float  #: Approximate size of the download, as AlphaFold's README states it
    unpacked_gb: float  #: Approximate size on the disk, from there too
    license: str  #: Licence or terms
    use: str  #: Use in a fold
    product: str  #: The FASTA file, or the common beginning of the names of an HH-suite database's files
    urls: tuple[str, ...]  #: Addresses. Several files of FASTA are joined to one.


_TABLE = f"""
uniref90     fasta    34     67    CC BY 4.0                     alignments
  uniref90.fasta                             {_UNIPROT}/uniref/uniref90/uniref90.fasta.gz
mgnify       fasta    67     120   CC0 1.0                       alignments
  mgy_clusters_2022_05.fa                    {_GOOGLE}/v2.3/mgy_clusters_2022_05.fa.gz
small_bfd    fasta    9.6    17    CC BY-SA 4.0                  alignments, in place of bfd and uniref30
  bfd-first_non_consensus_sequences.fasta    {_GOOGLE}/reduced_dbs/bfd-first_non_consensus_sequences.fasta.gz
bfd          archive  271.6  1800  CC BY-SA 4.0                  alignments (hhblits)
  {_BFD}  {_GOOGLE}/casp14_versions/{_BFD}.tar.gz
uniref30     archive  52.5   206   CC BY-SA 4.0                  alignments (hhblits)
  UniRef30_2021_03                           {_GOOGLE}/v2.3/UniRef30_2021_03.tar.gz
uniprot      fasta    53     105   CC BY 4.0                     pairs of complexes
  uniprot.fasta                              {_RELEASE}/uniprot_trembl.fasta.gz  {_RELEASE}/uniprot_sprot.fasta.gz
pdb70        archive  19.5   56    terms of HH-suite's databases  templates (hhsearch)
  pdb70                                      {_HHSUITE}/pdb70_from_mmcif_200401.tar.gz
pdb_seqres   file     0.2    0.2   CC0 1.0                       templates
  pdb_seqres.txt                             {_PDB}/derived_data/pdb_seqres.txt
pdb_mmcif    rsync    43     43    CC0 1.0                       structures of templates (rsync)
  {MMCIF_FOLDER}                                {_PDB}/data/status/obsolete.dat
"""
"""Two lines a database: the first six fields below, then product and addresses; fields end at two blanks."""


def _databases() -> Iterator[PublishedDatabase]:
    lines = [re.split(r" {2,}", line.strip()) for line in _TABLE.strip().splitlines()]
    for (name, kind, download, unpacked, license, use), (product, *urls) in zip(
        lines[::2], lines[1::2], strict=True
    ):
        yield PublishedDatabase(
            name=name,
            kind=cast(Kind, kind),
            download_gb=float(download),
            unpacked_gb=float(unpacked),
            license=license,
            use=use,
            product=product,
            urls=tuple(urls),
        )


DATABASES = tuple(_databases())
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
    path = next(iter(sorted((folder / name).glob(f"*{end}"))), None)
    return None if path is None else path.with_name(path.name.removesuffix(end))


def _has_hhblits() -> bool:
    return shutil.which("hhblits") is not None or find_spec("colabfold_binaries") is not None
