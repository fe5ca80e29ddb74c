"""Outcome of a hit or structure in the choice of templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = (
    Literal["used", "not needed", "coverage", "duplicate", "short", "repeated", "name"]
    | Literal["withdrawn", "date", "late", "no date", "missing file", "unreadable", "no chains"]
    | Literal["not found", "other sequence", "no atoms", "broken"]
)
"""``used``, or the reason why not:

- there are enough templates already (``not needed``);
- the search shows that it covers too little of the query (``coverage``), is the query itself (``duplicate``), is too
  short (``short``), repeats a template (``repeated``), or has a name other than a PDB chain (``name``);
- the PDB has withdrawn it (``withdrawn``), or it is too new by the list of release dates (``date``) or by its file
  (``late``), or has no date there (``no date``);
- its file is missing (``missing file``), damaged (``unreadable``), or without a protein (``no chains``);
- the chain is missing in the file (``not found``), has another sequence there (``other sequence``), too few atoms
  (``no atoms``), or neighbours that are too far apart (``broken``).
"""


class TemplateSkipped(Exception):
    """Hit or structure that cannot be a template; caught where templates are chosen."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True)
class Outcome:
    """Outcome of one hit or structure."""

    name: str  #: ``<PDB id>_<chain>`` of a hit, or a file's name and chain
    reason: Reason  #: ``used``, or the short reason why not
    message: str = ""  #: Reason for users; empty if it is used without remarks
    index: int = 0  #: Number of the hit in its search, from 1; 0 for a user's structure
    aligned: int = 0  #: Number of aligned residues of the query

    @property
    def used(self) -> bool:
        """True if it is a template."""
        return self.reason == "used"
