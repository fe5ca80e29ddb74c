"""Table of all scores: each row has a score's names, order, meaning and source.

Tables, the page, help texts and ``docs/scores.md`` read it. A new score needs a row, the function that computes it,
and a test.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Scale:
    """Words for ranges of a score, with the source of their limits.

    Example:
        >>> from fastfold.protein.metrics.scores import score
        >>> scale = score("iptm").scale
        >>> scale.word(0.6), scale.tone(0.9)
        ('may be right or wrong', 'good')
    """

    largest: float  #: Upper end; the lower end is 0
    cuts: tuple[float, ...]  #: Lower limits of all ranges but the first, ascending
    words: tuple[str, ...]  #: Word of each range, one more than ``cuts``
    tones: tuple[Literal["good", "fair", "poor"], ...]  #: Colour of each range
    source: str  #: Publication of the limits

    def word(self, value: float) -> str:
        """Return the word of a value's range."""
        return self.words[bisect_right(self.cuts, value)]

    def tone(self, value: float) -> Literal["good", "fair", "poor"]:
        """Return the colour of a value's range."""
        return self.tones[bisect_right(self.cuts, value)]


_EBI = "EMBL-EBI's guide to AlphaFold"


@dataclass(frozen=True)
class Score:
    """Row of the table.

    Example:
        >>> from fastfold.protein.metrics.scores import score
        >>> score("lis").label, score("lis").better, score("pair_iptm").key
        ('LIS', 'higher', 'iptm')
    """

    name: str  #: Unique name: column of ``interfaces.csv``, and key of conditions
    label: str  #: Name in tables of the page
    #: Subject: a prediction, two of its chains, its backbone, a comparison, or a design
    covers: Literal["prediction", "pair", "geometry", "given", "reference", "mutant", "design"]
    digits: int  #: Decimals in tables of the page
    better: Literal["higher", "lower", ""]  #: Direction; empty for a number that is neither good nor bad
    meaning: str = ""  #: Range, meaning, and thresholds with their source, in two sentences for the page
    definition: str = ""  #: Exact definition, Markdown of ``docs/scores.md``
    source: str = ""  #: Paper, Markdown of ``docs/scores.md``
    #: How a pair's score is computed from both directions; empty if it has none
    directions: Literal["larger", "mean", ""] = ""
    #: Column of ``summary.tsv``, for a pair's score with the largest of all pairs; empty if it is not listed there
    summary: str = ""
    #: Where the page shows it: in its list of predictions, only in the matrix of a screen, only in the details of a
    #: prediction, or nowhere
    shown: Literal["list", "matrix", "details", ""] = "list"
    is_count: bool = False  #: True for whole numbers
    is_share: bool = False  #: True for a share of 1, which tables show in percent
    scale: Scale | None = None  #: Words for its ranges; None if no publication gives limits

    @property
    def key(self) -> str:
        """Key of a scores file; that of a pair stands under ``interfaces``."""
        return self.name.removeprefix("pair_")


SCORES = (
    Score(
        "composite",
        label="composite",
        covers="given",
        digits=3,
        better="higher",
        meaning="0 to 1: pLDDT · pTM · TM-score to the given structure, which ranks structures of one protein "
        "(AF2Rank, Roney & Ovchinnikov 2022).",
    ),
    Score(
        "given_tm",
        label="TM to given",
        covers="given",
        digits=3,
        better="higher",
        meaning="0 to 1: TM-score of the prediction to the structure that was scored.",
    ),
    Score(
        "mean_plddt",
        label="pLDDT",
        covers="prediction",
        digits=1,
        better="higher",
        meaning="0 to 100: expected lDDT-CA. Above 90 very high, 70 to 90 high, 50 to 70 low, below 50 very low or "
        "disordered (AlphaFold DB).",
        summary="plddt",
        scale=Scale(
            100,
            (50, 70, 90),
            ("very low", "low", "high", "very high"),
            ("poor", "fair", "good", "good"),
            "AlphaFold DB, Varadi et al. 2022",
        ),
    ),
    Score(
        "ptm",
        label="pTM",
        covers="prediction",
        digits=2,
        better="higher",
        meaning="0 to 1: expected TM-score. Above 0.5 the overall fold may be right (EMBL-EBI).",
        summary="ptm",
        scale=Scale(1, (0.5,), ("uncertain fold", "fold may be right"), ("poor", "good"), _EBI),
    ),
    Score(
        "iptm",
        label="ipTM",
        covers="prediction",
        digits=2,
        better="higher",
        meaning="0 to 1: expected TM-score over pairs of residues in different chains. Above 0.8 the interface is "
        "confident, below 0.6 probably wrong (EMBL-EBI).",
        summary="iptm",
        scale=Scale(
            1,
            (0.6, 0.8),
            ("probably wrong", "may be right or wrong", "confident"),
            ("poor", "fair", "good"),
            _EBI,
        ),
    ),
    Score("ranking_confidence", label="ranking", covers="prediction", digits=2, better="higher", shown=""),
    Score(
        "dplddt_site",
        label="ΔpLDDT there",
        covers="mutant",
        digits=1,
        better="",
        meaning="pLDDT of the mutated residues minus that of the wild type.",
    ),
    Score(
        "dplddt",
        label="ΔpLDDT",
        covers="mutant",
        digits=1,
        better="",
        meaning="Mean pLDDT of a mutant minus that of the wild type, over pairs of predictions by one network with one "
        "seed.",
    ),
    Score(
        "dpae",
        label="ΔPAE (Å)",
        covers="mutant",
        digits=2,
        better="",
        meaning="Mean aligned error of a mutant minus that of the wild type, in Å.",
    ),
    Score(
        "dpae_site",
        label="ΔPAE there (Å)",
        covers="mutant",
        digits=2,
        better="",
        meaning="Mean aligned error of pairs with a mutated residue minus that of the wild type, in Å.",
    ),
    Score(
        "strain_site",
        label="strain there",
        covers="mutant",
        digits=3,
        better="",
        meaning="Effective strain of the mutated residues (McBride et al. 2023).",
    ),
    Score(
        "strain",
        label="strain",
        covers="mutant",
        digits=3,
        better="",
        meaning="Mean effective strain of a mutant: mean change of the vectors to neighbours within 13 Å, divided by "
        "their lengths (McBride et al. 2023).",
    ),
    Score(
        "ipsae",
        label="ipSAE",
        covers="pair",
        digits=2,
        better="higher",
        meaning="0 to 1: TM-score of the other chain over pairs with a small aligned error, so that disordered parts "
        "do not lower it (Dunbrack 2025).",
        definition="largest over i of the mean of TM(d0) over the j of the other chain with PAE<sub>ij</sub> < "
        "`pae_cutoff`; d0 of the number of these j, taken as at least 26, and d0 at least 1 Å",
        source="[Dunbrack 2025](https://doi.org/10.1101/2025.02.10.637595)",
        directions="larger",
        summary="ipsae_max",
    ),
    Score(
        "pdockq",
        label="pDockQ",
        covers="pair",
        digits=2,
        better="higher",
        meaning="0 to 0.74, from contacts and their pLDDT. Above 0.23 the interface is probably right, above 0.5 more "
        "so (Bryant et al. 2022).",
        definition="0.724 / (1 + exp(−0.052 (x − 152.611))) + 0.018, where x is `interface_plddt` · "
        "log<sub>10</sub>(`contacts`)",
        source="[Bryant et al. 2022](https://doi.org/10.1038/s41467-022-28865-w)",
        scale=Scale(
            0.742,
            (0.23, 0.5),
            ("doubtful", "probably right", "more probably right"),
            ("poor", "fair", "good"),
            "pDockQ, Bryant et al. 2022",
        ),
    ),
    Score(
        "pdockq2",
        label="pDockQ2",
        covers="pair",
        digits=2,
        better="higher",
        meaning="0 to 1, from contacts, their pLDDT and aligned error. Above 0.23 the interface is probably right (Zhu "
        "et al. 2023).",
        definition="1.31 / (1 + exp(−0.075 (x − 84.733))) + 0.005, where x is `interface_plddt` times the mean of "
        "TM(10 Å) over the contacts",
        source="[Zhu et al. 2023](https://doi.org/10.1093/bioinformatics/btad424)",
        directions="larger",
        scale=Scale(1, (0.23,), ("doubtful", "probably right"), ("poor", "good"), "pDockQ2, Zhu et al. 2023"),
    ),
    Score(
        "lis",
        label="LIS",
        covers="pair",
        digits=2,
        better="higher",
        meaning="0 to 1: mean of (12 − PAE) / 12 over pairs below 12 Å. Above 0.2 an interaction is likely (Kim et al. "
        "2024).",
        definition="mean of (12 − PAE) / 12 over the pairs with PAE < 12 Å",
        source="[Kim et al. 2024](https://doi.org/10.1101/2024.02.19.580970)",
        directions="mean",
    ),
    Score(
        "actifptm",
        label="actifpTM",
        covers="pair",
        digits=2,
        better="higher",
        meaning="0 to 1: ipTM where pairs count by their probability to touch (Varga et al. 2025).",
        definition="as `iptm` where each pair of residues counts by its probability to touch, of the distogram",
        source="[Varga et al. 2025](https://doi.org/10.1093/bioinformatics/btaf107)",
    ),
    Score(
        "pair_iptm",
        label="ipTM of pair",
        covers="pair",
        digits=2,
        better="higher",
        meaning="0 to 1: ipTM of two chains alone.",
        definition="ipTM of these two chains, with d0 of the length of the whole complex",
        source="[ColabFold](https://doi.org/10.1038/s41592-022-01488-1)",
        shown="matrix",
    ),
    Score(
        "contacts",
        label="contacts",
        covers="pair",
        digits=0,
        better="",
        meaning="Pairs of residues of two chains with CB atoms at most 8 Å apart.",
        definition="pairs of residues that touch; `interface_residues` are the residues of either chain that do",
        is_count=True,
    ),
    Score(
        "interface_plddt",
        label="interface pLDDT",
        covers="pair",
        digits=1,
        better="higher",
        definition="mean pLDDT of all residues that touch the other chain",
        source="Bryant et al. 2022",
        shown="details",
    ),
    Score(
        "interface_pae",
        label="interface PAE (Å)",
        covers="pair",
        digits=1,
        better="lower",
        meaning="Mean aligned error of the pairs that touch, in Å.",
        definition="mean PAE of the pairs that touch, in Å",
        directions="mean",
    ),
    Score(
        "pair_clashes",
        label="clashes of pair",
        covers="pair",
        digits=0,
        better="lower",
        definition="pairs of heavy atoms nearer than the sum of their van der Waals radii less 1.5 Å, except two "
        "cysteine sulphurs",
        source="Jumper et al. 2021, section 1.9.11",
        shown="details",
        is_count=True,
    ),
    Score(
        "ipsae_d0chn",
        label="ipSAE d0chn",
        covers="pair",
        digits=2,
        better="higher",
        definition="as `ipsae` with d0 of the length of both chains; 1 Å up to 27 residues",
        source="Dunbrack 2025",
        directions="larger",
        shown="details",
    ),
    Score(
        "ipsae_d0dom",
        label="ipSAE d0dom",
        covers="pair",
        digits=2,
        better="higher",
        definition="as `ipsae` with d0 of the number of residues of both chains that are in some pair under the cutoff",
        source="Dunbrack 2025",
        directions="larger",
        shown="details",
    ),
    Score(
        "iptm_d0chn",
        label="ipTM d0chn",
        covers="pair",
        digits=2,
        better="higher",
        definition="as `ipsae_d0chn`, the mean over all j",
        source="Dunbrack 2025",
        directions="larger",
        shown="details",
    ),
    Score(
        "clashes",
        label="clashes",
        covers="prediction",
        digits=0,
        better="lower",
        meaning="Pairs of atoms of different chains that overlap. Many mean that the prediction is wrong.",
        summary="clashes",
        is_count=True,
    ),
    Score(
        "relaxed_energy",
        label="energy (kJ/mol)",
        covers="prediction",
        digits=0,
        better="",
        meaning="Energy after relaxation in the Amber force field.",
    ),
    Score(
        "ramachandran_favoured",
        label="Ramachandran favoured",
        covers="geometry",
        digits=0,
        better="higher",
        meaning="Share of residues in the region of 98% of the residues of good experimental structures (Lovell et al. "
        "2003).",
        shown="details",
        is_share=True,
        scale=Scale(
            1,
            (0.98,),
            ("below MolProbity's goal", "at MolProbity's goal"),
            ("fair", "good"),
            "MolProbity, Williams et al. 2018",
        ),
    ),
    Score(
        "ramachandran_outliers",
        label="Ramachandran outliers",
        covers="geometry",
        digits=1,
        better="lower",
        meaning="Share of residues outside of the allowed regions (Lovell et al. 2003).",
        shown="details",
        is_share=True,
    ),
    Score(
        "twisted_peptides",
        label="twisted peptide bonds",
        covers="geometry",
        digits=0,
        better="lower",
        meaning="Omega more than 30° from 0° and 180°.",
        shown="details",
        is_count=True,
    ),
    Score(
        "cis_peptides",
        label="cis peptide bonds",
        covers="geometry",
        digits=0,
        better="",
        meaning="Before residues other than proline.",
        shown="details",
        is_count=True,
    ),
    Score(
        "bond_outliers",
        label="unusual bond lengths",
        covers="geometry",
        digits=0,
        better="lower",
        meaning="More than 4 standard deviations from Engh and Huber's.",
        shown="details",
        is_count=True,
    ),
    Score(
        "angle_outliers",
        label="unusual bond angles",
        covers="geometry",
        digits=0,
        better="lower",
        meaning="More than 4 standard deviations from Engh and Huber's.",
        shown="details",
        is_count=True,
    ),
    Score(
        "wrong_hands",
        label="mirrored carbons",
        covers="geometry",
        digits=0,
        better="lower",
        meaning="CA, and CB of threonine and isoleucine.",
        shown="details",
        is_count=True,
    ),
    Score(
        "overlaps",
        label="overlapping pairs of atoms",
        covers="geometry",
        digits=0,
        better="lower",
        meaning="Radii overlap by more than 1.5 Å.",
        shown="details",
        is_count=True,
    ),
    Score(
        "pierced_rings",
        label="pierced rings",
        covers="geometry",
        digits=0,
        better="lower",
        meaning="A bond passes through a side chain's ring.",
        shown="details",
        is_count=True,
    ),
    Score(
        "tm_score",
        label="TM-score",
        covers="reference",
        digits=3,
        better="higher",
        meaning="0 to 1: TM-score to the reference structure.",
        shown="details",
    ),
    Score(
        "rmsd_ca",
        label="RMSD to the reference (Å)",
        covers="reference",
        digits=2,
        better="lower",
        meaning="Å: RMSD of the CA atoms that both structures have, after one superposition.",
        shown="details",
    ),
    Score(
        "lddt_ca",
        label="lDDT-CA",
        covers="reference",
        digits=3,
        better="higher",
        meaning="0 to 1: lDDT of the CA atoms to the reference structure.",
        shown="details",
    ),
    Score(
        "gdt_ts",
        label="GDT-TS",
        covers="reference",
        digits=3,
        better="higher",
        meaning="0 to 1: GDT-TS to the reference structure.",
        shown="details",
    ),
    Score(
        "dockq",
        label="DockQ",
        covers="reference",
        digits=3,
        better="higher",
        meaning="0 to 1: DockQ to the reference structure.",
        shown="details",
    ),
    Score(
        "lddt_interface",
        label="iLDDT",
        covers="reference",
        digits=3,
        better="higher",
        meaning="0 to 1: lDDT over contacts between chains of the reference structure.",
        shown="details",
    ),
    Score(
        "loss",
        label="loss",
        covers="design",
        digits=2,
        better="lower",
        meaning="Loss of the best step of the optimization.",
        shown="list",
    ),
    Score(
        "rmsd",
        label="RMSD (Å)",
        covers="design",
        digits=2,
        better="lower",
        meaning="RMSD of the CA atoms of the fold and of the design.",
        shown="list",
    ),
    Score(
        "dsasa",
        label="buried area (Å²)",
        covers="design",
        digits=0,
        better="higher",
        meaning="",
        shown="details",
    ),
    Score(
        "sc",
        label="shape complementarity",
        covers="design",
        digits=2,
        better="higher",
        meaning="",
        shown="details",
    ),
    Score(
        "hbonds",
        label="hydrogen bonds at the interface",
        covers="design",
        digits=0,
        better="higher",
        meaning="",
        shown="details",
    ),
    Score(
        "backbone_rmsd",
        label="RMSD to the given backbone (Å)",
        covers="design",
        digits=2,
        better="lower",
        meaning="",
        shown="details",
    ),
    Score(
        "motif_rmsd",
        label="RMSD of the motif (Å)",
        covers="design",
        digits=2,
        better="lower",
        meaning="",
        shown="details",
    ),
    Score(
        "seqid",
        label="sequence recovery",
        covers="design",
        digits=2,
        better="",
        meaning="",
        shown="details",
    ),
    Score(
        "ring_gap",
        label="ends of the ring apart (Å)",
        covers="design",
        digits=2,
        better="lower",
        meaning="",
        shown="details",
    ),
)
"""All scores, in the order of tables."""

PAIR_SCORES = tuple(one for one in SCORES if one.covers == "pair")
"""Scores of two chains."""

SUMMARY_SCORES = tuple(one for one in SCORES if one.summary)
"""Scores that ``summary.tsv`` lists."""

LARGEST_OF_PAIRS = {one.summary: one.key for one in PAIR_SCORES if one.summary}
"""Key of a pair's score by the name of the largest of all pairs."""

_BY_NAME = {one.name: one for one in SCORES}


def score(name: str) -> Score:
    """Return the row of a score, or raise KeyError."""
    return _BY_NAME[name]


def definitions_table() -> str:
    """Return the table of definitions of pair scores in ``docs/scores.md``, as Markdown."""
    words = {"higher": "better", "lower": "worse", "": ""}
    lines = ["| key | higher is | definition | source |", "|---|---|---|---|"]
    lines += [
        f"| `{one.key}` | {words[one.better]} | {one.definition} | {one.source} |".replace("|  |", "| |")
        for one in PAIR_SCORES
    ]
    return "\n".join(lines)
