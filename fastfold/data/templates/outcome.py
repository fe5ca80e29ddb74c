"""What became of a hit or a structure that could have been a template, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal[
    "used",
    "repeated",
    "not needed",
    "withdrawn",
    "date",
    "coverage",
    "duplicate",
    "short",
    "name",
    "missing file",
    "unreadable",
    "no chains",
    "no date",
    "late",
    "not found",
    "other sequence",
    "no atoms",
    "broken",
]
"""``used``, or why not:

- there are enough templates without it (``not needed``);
- the search says so: it covers too little of the query (``coverage``), is the query itself (``duplicate``), too short
  (``short``), repeats a template (``repeated``), or is no PDB chain by its name (``name``);
- the PDB has withdrawn it (``withdrawn``), or it is too new by the list of release dates (``date``) or by its file
  (``late``), or that has no date (``no date``);
- its file is not there (``missing file``), is damaged (``unreadable``), or has no protein (``no chains``);
- the chain is not in the file (``not found``), has another sequence there (``other sequence``), too few atoms (``no
  atoms``), or neighbours that lie too far apart (``broken``).
"""


class TemplateSkipped(Exception):
    """A hit or structure that cannot be a template; caught where templates are chosen.

    Args:
        reason: Why, in short.
        message: Why, for people.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True)
class Outcome:
    """What became of one hit or structure.

    Attributes:
        name: What it is called: a hit's ``<PDB id>_<chain>``, or a file's name and chain.
        reason: ``used``, or why not, in short.
        message: Why not, for people; empty if it is used without remarks.
        index: Number of the hit in its search, from 1; 0 for a structure that was given.
        aligned: Residues of the query that have a residue of the template.
    """

    name: str
    reason: Reason
    message: str = ""
    index: int = 0
    aligned: int = 0

    @property
    def used(self) -> bool:
        """Whether it is a template."""
        return self.reason == "used"
