"""``TemplateOptions``: sources of templates, light enough for the command line's help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError
from fastfold.utils.option_fields import check_options, option

MAX_TEMPLATES = 4  #: Number of templates used by AlphaFold's networks

_PATH: dict[str, Any] = {"default": None, "parse": Path, "group": "templates"}
_PATHS: dict[str, Any] = {**_PATH, "default": ()}


def parse_date(text: str) -> date:
    """Parse a date, YYYY-MM-DD.

    Raises:
        ConfigError: The text is none.
    """
    try:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            raise ValueError
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text[:20]!r} is not a date such as 2021-11-01") from None


@dataclass(frozen=True)
class TemplateOptions:
    """Sources of templates; each option has its help.

    In Python, a structure may be an object in place of a file (:func:`fastfold.protein.io.read.read_structure`); it
    becomes a :class:`~fastfold.protein.structure.Structure`. ``server`` uses hits of an MSA server, which are next to
    the alignments; ``is_optional`` accepts networks that use no templates.

    Raises:
        ConfigError: An option lacks another that it needs, or there are more templates than networks use.
    """

    structures: tuple[Any, ...] = option(
        "--templates",
        "--custom-template-path",
        nargs="*",
        metavar="PATH",
        **_PATHS,
        help="structures to use as templates: mmCIF or PDB files (.gz too), or folders of them; without any, the MSA "
        "server's template hits (needs hhsearch)",
    )
    alignments: tuple[Path, ...] = option(
        "--template-alignment",
        nargs="+",
        metavar="FILE",
        is_rare=True,
        **_PATHS,
        help="A3M or FASTA: a chain, then rows called <file>_<chain> that say how --templates are aligned with it",
    )
    database: Path | None = option(
        "--template-db",
        metavar="FILE",
        **_PATH,
        help="search this for templates: pdb_seqres.txt, or an HH-suite database (…/pdb70; needs hhsearch)",
    )
    hits: Path | None = option(
        "--template-hits",
        "--pdb-hit-file",
        "--pdb_hit_file",
        metavar="FILE",
        **_PATH,
        help="hits of MMseqs2 (.m8), as colabfold_search writes them; hhsearch aligns the chains of their entries",
    )
    server: bool = False
    mmcif_dir: Path | None = option(
        "--template-mmcif-dir",
        "--template_mmcif_dir",
        "--local-pdb-path",
        metavar="DIR",
        **_PATH,
        help="folder of the PDB's mmCIF files, for --template-db, --template-hits and for hits among the alignments",
    )
    obsolete: Path | None = option(
        "--obsolete-pdbs",
        "--obsolete_pdbs_path",
        metavar="FILE",
        is_rare=True,
        **_PATH,
        help="the PDB's list of obsolete entries (default: obsolete.dat in the folder of mmCIF files or next to it)",
    )
    max_date: date | None = option(
        "--max-template-date",
        "--max_template_date",
        default=None,
        parse=parse_date,
        metavar="DATE",
        group="templates",
        help="use no hits released after this date, YYYY-MM-DD (default: any)",
    )
    max_templates: int = option(
        default=MAX_TEMPLATES,
        bounds=(1, MAX_TEMPLATES),
        is_rare=True,
        group="templates",
        help=f"use at most N templates of a chain (default {MAX_TEMPLATES}, as many as the networks take)",
    )
    is_optional: bool = False
    complexes: tuple[Any, ...] = option(
        "--cross-chain-templates",
        nargs="+",
        metavar="FILE",
        **_PATHS,
        help="structures of whole complexes as templates, with the distances between their chains",
    )
    chains: tuple[Any, ...] = option(
        "--superpose-chains",
        nargs="+",
        metavar="FILE",
        is_rare=True,
        **_PATHS,
        help="structures of single chains that replace those of --cross-chain-templates, superposed on them",
    )
    keep_clashes: bool = option(
        default=False,
        is_rare=True,
        group="templates",
        help="keep clashing residues of --cross-chain-templates, which are left free by default",
    )
    overlap: float | None = option(
        "--clash-overlap",
        default=None,
        bounds=(0.0, 4.0),
        metavar="Å",
        is_rare=True,
        group="templates",
        help="residues of --cross-chain-templates clash if van der Waals spheres overlap by this, as in AlphaPulldown "
        "(0.9 there), instead of CA atoms within 3.5 Å",
    )
    chain_map: Path | None = option(
        "--template-chains",
        metavar="FILE",
        is_rare=True,
        **_PATH,
        help="CSV with lines protein,file,chain: chains of --cross-chain-templates for those of the target, as "
        "AlphaPulldown's description file (default: by sequence)",
    )
    min_plddt: float = option(
        "--template-min-plddt",
        default=0.0,
        bounds=(0.0, 100.0),
        metavar="X",
        is_rare=True,
        group="templates",
        help="leave residues of --cross-chain-templates with a lower pLDDT (B-factor) free (default 0)",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("structures", "complexes", "chains"):
            if any(not isinstance(one, Path) for one in getattr(self, name)):
                from fastfold.protein.io.read import read_objects

                object.__setattr__(self, name, read_objects(getattr(self, name)))
        if self.database is not None and self.mmcif_dir is None:
            raise ConfigError(
                "`TemplateOptions.database` needs `TemplateOptions.mmcif_dir=DIR`, the folder of the PDB's mmCIF files"
            )
        if self.hits is not None and self.mmcif_dir is None:
            raise ConfigError(
                "`TemplateOptions.hits` needs `TemplateOptions.mmcif_dir=DIR`, the folder of the PDB's mmCIF files"
            )
        if self.hits is not None and self.database is not None:
            raise ConfigError(
                "`TemplateOptions.hits` has the hits that `TemplateOptions.database` searches for; give one of the two"
            )
        if self.alignments and not self.structures:
            raise ConfigError("`TemplateOptions.alignments` needs `templates`, the aligned structures")
        if self.server and self.database is not None:
            raise ConfigError(
                "`templates` without files uses hits of the MSA server, `TemplateOptions.database` those of a search "
                "here; give one of the two"
            )
        if self.obsolete is not None and self.mmcif_dir is None:
            raise ConfigError(
                "`TemplateOptions.obsolete` needs `TemplateOptions.mmcif_dir`, the folder of the entries' files"
            )
        if self.max_date is not None and self.mmcif_dir is None and not self.server:
            raise ConfigError(
                "`TemplateOptions.max_date` limits hits, which need `TemplateOptions.mmcif_dir`; structures of "
                "`templates` are always used"
            )
        if self.chains and not self.complexes:
            raise ConfigError(
                "`TemplateOptions.chains` needs `TemplateOptions.complexes`, the complex that the chains are "
                "superposed on"
            )
        for name, is_given in (
            ("`TemplateOptions.chain_map`", self.chain_map is not None),
            ("`TemplateOptions.overlap`", self.overlap is not None),
            ("`TemplateOptions.min_plddt`", self.min_plddt != 0),
        ):
            if is_given and not self.complexes:
                raise ConfigError(
                    f"{name} belongs to `TemplateOptions.complexes`; give these, or leave it out"
                )
        if self.overlap is not None and self.keep_clashes:
            raise ConfigError(
                "`TemplateOptions.overlap` says which residues clash, and `keep_clashes` keeps all; give one"
            )
        if self.overlap == 0:
            raise ConfigError("`TemplateOptions.overlap` must be over 0 and at most 4 Å, found 0")
        if len(self.complexes) > self.max_templates:
            raise ConfigError(
                f"`TemplateOptions.complexes`: {len(self.complexes)} files, but `max_templates` is {self.max_templates}"
            )

    @property
    def wanted(self) -> bool:
        """True if templates are requested."""
        return bool(self.complexes) or self.has_single_chains

    @property
    def has_single_chains(self) -> bool:
        """True if templates of single chains are requested."""
        return bool(self.structures) or self.server or self.mmcif_dir is not None
