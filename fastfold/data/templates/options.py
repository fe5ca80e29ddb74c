"""``TemplateOptions``: sources of templates, light enough for the command line's help."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError

MAX_TEMPLATES = 4
"""Number of templates used by AlphaFold's networks."""


@dataclass(frozen=True)
class TemplateOptions:
    """Sources of templates.

    In Python, a structure may be an object in place of a file (:func:`fastfold.protein.io.read.read_structure`); it
    becomes a :class:`~fastfold.protein.structure.Structure`.

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
        complexes: Structures of whole complexes, whose templates span the chains.
        chains: Structures of single chains that replace those of the complexes, superposed on them.
        keep_clashes: Keep residues of complexes that clash, instead of leaving them free.
        is_optional: Accept networks that use no templates.

    Raises:
        ConfigError: An option lacks another that it needs, or there are more templates than networks use.
    """

    structures: tuple[Any, ...] = ()
    alignments: tuple[Path, ...] = ()
    database: Path | None = None
    server: bool = False
    mmcif_dir: Path | None = None
    obsolete: Path | None = None
    max_date: date | None = None
    max_templates: int = MAX_TEMPLATES
    is_optional: bool = False
    complexes: tuple[Any, ...] = ()
    chains: tuple[Any, ...] = ()
    keep_clashes: bool = False

    def __post_init__(self) -> None:
        for name in ("structures", "complexes", "chains"):
            if any(not isinstance(one, Path) for one in getattr(self, name)):
                from fastfold.protein.io.read import read_objects

                object.__setattr__(self, name, read_objects(getattr(self, name)))
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

        if self.chains and not self.complexes:
            raise ConfigError(
                "--superpose-chains needs --cross-chain-templates, the complex that the chains are superposed on"
            )
        if len(self.complexes) > self.max_templates:
            raise ConfigError(
                f"--cross-chain-templates: {len(self.complexes)} files, but --max-templates is {self.max_templates}"
            )

    @property
    def wanted(self) -> bool:
        """True if templates are requested."""
        return bool(self.complexes) or self.has_single_chains

    @property
    def has_single_chains(self) -> bool:
        """True if templates of single chains are requested."""
        return bool(self.structures) or self.server or self.mmcif_dir is not None
