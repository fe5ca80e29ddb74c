"""Papers whose methods a prediction uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Citation:
    """A paper.

    Attributes:
        key: Short name, for BibTeX too.
        use: Use of its method in FastFold.
        title: Title.
        authors: Names such as ``Jumper, J.``, joined by semicolons.
        journal: Journal or archive.
        year: Year.
        doi: Digital object identifier.
        volume: Volume; empty without one.
        pages: First and last page, or number of the article; empty without one.
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


CITATIONS = (
    Citation(
        key="alphafold",
        use="network and structure of single chains",
        title="Highly accurate protein structure prediction with AlphaFold",
        authors=(
            "Jumper, J.; Evans, R.; Pritzel, A.; Green, T.; Figurnov, M.; Ronneberger, O.; Tunyasuvunakool, K.; "
            "Bates, R.; Žídek, A.; Potapenko, A.; Bridgland, A.; Meyer, C.; Kohl, S. A. A.; Ballard, A. J.; "
            "Cowie, A.; Romera-Paredes, B.; Nikolov, S.; Jain, R.; Adler, J.; Back, T.; Petersen, S.; Reiman, D.; "
            "Clancy, E.; Zielinski, M.; Steinegger, M.; Pacholska, M.; Berghammer, T.; Bodenstein, S.; Silver, "
            "D.; Vinyals, O.; Senior, A. W.; Kavukcuoglu, K.; Kohli, P.; Hassabis, D."
        ),
        journal="Nature",
        year=2021,
        doi="10.1038/s41586-021-03819-2",
        volume="596",
        pages="583-589",
    ),
    Citation(
        key="multimer",
        use="network of complexes",
        title="Protein complex prediction with AlphaFold-Multimer",
        authors=(
            "Evans, R.; O'Neill, M.; Pritzel, A.; Antropova, N.; Senior, A.; Green, T.; Žídek, A.; Bates, R.; "
            "Blackwell, S.; Yim, J.; Ronneberger, O.; Bodenstein, S.; Zielinski, M.; Bridgland, A.; Potapenko, "
            "A.; Cowie, A.; Tunyasuvunakool, K.; Jain, R.; Clancy, E.; Kohli, P.; Jumper, J.; Hassabis, D."
        ),
        journal="bioRxiv",
        year=2021,
        doi="10.1101/2021.10.04.463034",
    ),
    Citation(
        key="fastfold",
        use="dynamic axial parallelism (--parallel)",
        title="FastFold: Reducing AlphaFold Training Time from 11 Days to 67 Hours",
        authors=(
            "Cheng, S.; Zhao, X.; Lu, G.; Fang, J.; Yu, Z.; Zheng, T.; Wu, R.; Zhang, X.; Peng, J.; You, Y."
        ),
        journal="arXiv",
        year=2022,
        doi="10.48550/arXiv.2203.00854",
        volume="2203.00854",
    ),
    Citation(
        key="colabfold",
        use="alignments of --msa-server and --engine mmseqs",
        title="ColabFold: making protein folding accessible to all",
        authors="Mirdita, M.; Schütze, K.; Moriwaki, Y.; Heo, L.; Ovchinnikov, S.; Steinegger, M.",
        journal="Nature Methods",
        year=2022,
        doi="10.1038/s41592-022-01488-1",
        volume="19",
        pages="679-682",
    ),
    Citation(
        key="hmmer",
        use="alignments of jackhmmer and phmmer",
        title="Accelerated Profile HMM Searches",
        authors="Eddy, S. R.",
        journal="PLoS Computational Biology",
        year=2011,
        doi="10.1371/journal.pcbi.1002195",
        volume="7",
        pages="e1002195",
    ),
    Citation(
        key="hhsuite",
        use="alignments of hhblits, templates of hhsearch",
        title="HH-suite3 for fast remote homology detection and deep protein annotation",
        authors="Steinegger, M.; Meier, M.; Mirdita, M.; Vöhringer, H.; Haunsberger, S. J.; Söding, J.",
        journal="BMC Bioinformatics",
        year=2019,
        doi="10.1186/s12859-019-3019-7",
        volume="20",
        pages="473",
    ),
    Citation(
        key="afsample2",
        use="samples with masked alignment columns (--sample columns)",
        title="AFsample2 predicts multiple conformations and ensembles with AlphaFold2",
        authors="Kalakoti, Y.; Wallner, B.",
        journal="Communications Biology",
        year=2025,
        doi="10.1038/s42003-025-07791-9",
        volume="8",
        pages="373",
    ),
    Citation(
        key="afcluster",
        use="samples from clusters of alignment rows (--sample clusters)",
        title="Predicting multiple conformations via sequence clustering and AlphaFold2",
        authors=(
            "Wayment-Steele, H. K.; Ojoawo, A.; Otten, R.; Apitz, J. M.; Pitsawong, W.; Hömberger, M.; "
            "Ovchinnikov, S.; Colwell, L.; Kern, D."
        ),
        journal="Nature",
        year=2024,
        doi="10.1038/s41586-023-06832-9",
        volume="625",
        pages="832-839",
    ),
    Citation(
        key="subsampling",
        use="samples from random alignment rows (--sample depth)",
        title="Sampling alternative conformational states of transporters and receptors with AlphaFold2",
        authors="del Alamo, D.; Sala, D.; Mchaourab, H. S.; Meiler, J.",
        journal="eLife",
        year=2022,
        doi="10.7554/eLife.75751",
        volume="11",
        pages="e75751",
    ),
    Citation(
        key="afsample",
        use="samples with dropout (--sample dropout)",
        title="AFsample: improving multimer prediction with AlphaFold using massive sampling",
        authors="Wallner, B.",
        journal="Bioinformatics",
        year=2023,
        doi="10.1093/bioinformatics/btad573",
        volume="39",
        pages="btad573",
    ),
    Citation(
        key="openmm",
        use="relaxation",
        title="OpenMM 8: Molecular Dynamics Simulation with Machine Learning Potentials",
        authors="Eastman, P.; Galvelis, R.; Peláez, R. P.; others",
        journal="The Journal of Physical Chemistry B",
        year=2024,
        doi="10.1021/acs.jpcb.3c06662",
        volume="128",
        pages="109-116",
    ),
)
"""Papers of all methods."""


def find_citations(keys: Iterable[str]) -> list[Citation]:
    """Return the papers of some keys, in the order of :data:`CITATIONS`."""
    wanted = set(keys)
    return [citation for citation in CITATIONS if citation.key in wanted]
