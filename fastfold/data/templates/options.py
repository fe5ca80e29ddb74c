"""``TemplateOptions``: sources of templates, light enough for the command line's help."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from fastfold.errors import ConfigError

MAX_TEMPLATES = 4
"""Number of templates used by AlphaFold's networks."""


@dataclass(frozen=True)
class TemplateOptions:
    """Sources of templates.

    Attributes:
        structures: Structures of the user, mmCIF and PDB files or folders of them.
        alignments: Alignments of the user, see :func:`fastfold.data.templates.custom.read_custom_alignment`.
        database: Searched database: ``pdb_seqres.txt`` (or ``.gz``), or the common prefix of an HH-suite database's
            files.
        server: Use hits of an MSA server, which are next to the alignments.
        mmcif_dir: Folder of the PDB's mmCIF files, for the atoms of hits.
        obsolete: The PDB's list of obsolete entries, see :class:`fastfold.data.templates.database.MmcifFolder`.
        max_date: Latest release date of a hit, None for any.
        max_templates: Largest number of templates of a chain.
        is_optional: Accept networks that use no templates.

    Raises:
        ConfigError: An option lacks another that it needs, or there are more templates than networks use.
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
                "--template-db needs --template-mmcif-dir DIR, the folder of the PDB's mmCIF files"
            )
        if self.alignments and not self.structures:
            raise ConfigError("--template-alignment needs --templates, the aligned structures")
        if self.server and self.database is not None:
            raise ConfigError(
                "--templates without files uses hits of the MSA server, --template-db those of a search here; give one "
                "of the two"
            )
        if self.obsolete is not None and self.mmcif_dir is None:
            raise ConfigError("--obsolete-pdbs needs --template-mmcif-dir, the folder of the entries' files")
        if not 1 <= self.max_templates <= MAX_TEMPLATES:
            raise ConfigError(
                f"--max-templates must be from 1 to {MAX_TEMPLATES}, the number that the networks use"
            )

    @property
    def wanted(self) -> bool:
        """True if templates are requested."""
        return bool(self.structures) or self.server or self.mmcif_dir is not None
