"""Papers whose methods a prediction uses, from ``citations.json`` next to this file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastfold.utils.foreign_text import package_json


@dataclass(frozen=True)
class Citation:
    """A paper.

    The key is a short name, for BibTeX too. Authors are names such as ``Jumper, J.``, joined by semicolons. Volume and
    pages, which may be the number of the article, are empty without one.
    """

    key: str
    use: str
    title: str
    authors: str
    journal: str
    year: int
    doi: str
    volume: str = ""
    pages: str = ""

    @property
    def author_list(self) -> list[str]:
        """The authors."""
        return self.authors.split("; ")

    def text(self) -> str:
        """Return the citation in words, with at most three authors."""
        names = self.author_list
        shown = "; ".join(names[:3]) + (" et al." if len(names) > 3 else "")
        place = " ".join(part for part in (self.journal, self.volume) if part)
        pages = f", {self.pages}" if self.pages else ""
        return f"{shown} {self.title}. {place}{pages} ({self.year}). https://doi.org/{self.doi}"

    def bibtex(self) -> str:
        """Return the citation as an entry of BibTeX."""
        fields = {
            "title": f"{{{self.title}}}",
            "author": " and ".join(self.author_list),
            "journal": self.journal,
            "volume": self.volume,
            "pages": self.pages.replace("-", "--"),
            "year": str(self.year),
            "doi": self.doi,
        }
        lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items() if value)
        return f"@article{{{self.key},\n{lines}\n}}"


CITATIONS = tuple(
    Citation(**paper) for paper in package_json("fastfold.protein", "citations.json")
)  #: Papers of all methods


def find_citations(keys: Iterable[str]) -> list[Citation]:
    """Return the papers of some keys, in the order of :data:`CITATIONS`."""
    wanted = set(keys)
    return [citation for citation in CITATIONS if citation.key in wanted]
