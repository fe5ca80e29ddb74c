"""Databases that AlphaFold 2.3's scripts download: addresses, sizes, licences, and places in the folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastfold.errors import ConfigError

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
