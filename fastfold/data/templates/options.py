"""``TemplateOptions``: where the templates of a run come from, light enough for the command line's help."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from fastfold.errors import ConfigError

MAX_TEMPLATES = 4
"""Templates that the networks of AlphaFold take."""


@dataclass(frozen=True)
class TemplateOptions:
    """Where templates come from.

    Attributes:
        structures: Structures of the user, mmCIF and PDB files or folders of them.
        alignments: How the user aligned them, see :func:`fastfold.data.templates.custom.read_custom_alignment`.
        database: What is searched: ``pdb_seqres.txt`` (or ``.gz``), or the common beginning of the names of an HH-suite
            database's files.
        server: Use hits of an MSA server, which lie among the alignments.
        mmcif_dir: Folder of the PDB's mmCIF files, from which hits get their atoms.
        obsolete: The PDB's list of obsolete entries, see :class:`fastfold.data.templates.database.MmcifFolder`.
        max_date: Newest release date of a hit, None for any.
        max_templates: Templates of a chain at most.
        is_optional: Networks that take no templates are no error.

    Raises:
        ConfigError: One is given without another that it needs, or there are more templates than networks take.
    """

    structures: tuple[Path, ...] = ()
    alignments: tuple[Path, ...] = ()
    database: Path | None = None
    server: bool = False
    mmcif_dir: Path | None = None
    obsolete: Path | None = None
    max_date: date | None = None
    max_templates: int = MAX_TEMPLATES
    is_optional: bool = False

    def __post_init__(self) -> None:
        if self.database is not None and self.mmcif_dir is None:
            raise ConfigError(
                "--template-db finds which structures are templates; --template-mmcif-dir DIR must say where their "
                "mmCIF files lie"
            )
        if self.alignments and not self.structures:
            raise ConfigError("--template-alignment says how --templates are aligned; give these too")
        if self.server and self.database is not None:
            raise ConfigError(
                "--templates without files uses hits of the MSA server, --template-db those of a search here; give one "
                "of the two"
            )
        if self.obsolete is not None and self.mmcif_dir is None:
            raise ConfigError("--obsolete-pdbs needs --template-mmcif-dir, the folder of the entries' files")
        if not 1 <= self.max_templates <= MAX_TEMPLATES:
            raise ConfigError(
                f"--max-templates must be from 1 to {MAX_TEMPLATES}, as many as the networks take"
            )

    @property
    def wanted(self) -> bool:
        """Whether somebody asked for templates."""
        return bool(self.structures) or self.server or self.mmcif_dir is not None
