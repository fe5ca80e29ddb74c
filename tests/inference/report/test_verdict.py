"""The sentence about a prediction follows its scores by rules, with the limits of their papers."""

from __future__ import annotations

from typing import Any

import pytest

from fastfold.inference.report.verdict import verdict_of
from fastfold.protein.metrics.scores import score


def chain(plddt: list[float], **changes: Any) -> dict[str, Any]:
    return {"sequences": ["A" * len(plddt)], "plddt": plddt, "ptm": 0.6, **changes}


def complex_of(iptm: float | None, pdockq2: float | None = 0.5, **changes: Any) -> dict[str, Any]:
    pairs = {"A-B": {"ipsae": 0.1, "pdockq2": 0.9}, "A-C": {"ipsae": 0.4, "pdockq2": pdockq2, "contacts": 12}}
    scores = {"sequences": ["AA", "AA", "AA"], "plddt": [80.0] * 6, "ptm": 0.7, "iptm": iptm}
    return {**scores, "interfaces": {"pairs": pairs}, **changes}


@pytest.mark.parametrize(
    ("plddt", "ptm", "tone", "word"),
    [
        (70.0, 0.5, "good", "Fold may be right."),
        (70.0, 0.49, "fair", "Local structure only."),
        (69.9, 0.5, "fair", "Fold may be right, details uncertain."),
        (69.9, 0.49, "poor", "Low confidence."),
        (70.0, None, "good", "Local structure is confident."),
        (69.9, None, "poor", "Low confidence."),
    ],
)
def test_a_chain_is_judged_by_ptm_and_plddt(plddt: float, ptm: float | None, tone: str, word: str) -> None:
    found = verdict_of(chain([plddt] * 4, ptm=ptm))
    assert (found["tone"], found["word"]) == (tone, word)
    assert ("pTM" in found["text"]) == (ptm is not None)


def test_weak_residues_are_named_by_chain_and_number() -> None:
    text = verdict_of(chain([40.0, 40.0, 70.0, 49.9, 50.0, 69.9]))["text"]
    assert text == (
        "pTM 0.60 is at least 0.5 and 1 of 6 residues have a pLDDT of at least 70. Residues below 50: 1 to 2, 4."
    )
    many = verdict_of(chain([40.0, 90.0] * 5))["text"]
    assert many.endswith("Residues below 50: 1, 3, 5 and others.")
    three = verdict_of(chain([40.0, 90.0] * 3))["text"]
    assert three.endswith("Residues below 50: 1, 3, 5.")
    two = {"sequences": ["AA", "AA"], "plddt": [90.0, 40.0, 40.0, 90.0], "ptm": None, "iptm": None}
    assert verdict_of(two)["text"].endswith("Residues below 50: A 2, B 1.")


def test_chains_whose_names_have_dashes_are_told_apart() -> None:
    scores = {
        "sequences": ["AA", "AA"],
        "chain_ids": ["b-1", "A"],
        "plddt": [80.0] * 4,
        "ptm": 0.7,
        "iptm": 0.8,
    }
    pairs = {"b-1-A": {"ipsae": 0.1}}
    assert "b-1 with A: ipSAE 0.10" in verdict_of(scores | {"interfaces": {"pairs": pairs}})["text"]


@pytest.mark.parametrize(
    ("iptm", "pdockq2", "tone", "word"),
    [
        (0.8, 0.23, "good", "Confident interface."),
        (0.8, 0.229, "fair", "Scores disagree."),
        (0.8, None, "good", "Confident interface."),
        (0.799, 0.9, "fair", "Interface uncertain."),
        (0.6, 0.9, "fair", "Interface uncertain."),
        (0.599, 0.9, "poor", "Interface probably wrong."),
    ],
)
def test_a_complex_is_judged_by_iptm_and_its_best_pair(
    iptm: float, pdockq2: float | None, tone: str, word: str
) -> None:
    """The best pair has the largest ipSAE; the pDockQ2 of another does not count."""
    found = verdict_of(complex_of(iptm, pdockq2))
    assert (found["tone"], found["word"]) == (tone, word)
    assert "best pair A with C: ipSAE 0.40" in found["text"]
    assert "contacts 12" in found["text"]
    for source in (score("iptm").scale, score("pdockq2").scale):
        assert source is not None
        assert source.source in found["rule"]


def test_a_complex_without_iptm_is_judged_as_a_chain() -> None:
    assert verdict_of(complex_of(None))["word"] == "Fold may be right."


def test_structures_that_cannot_be_right_come_first() -> None:
    """The scores stay in the sentence."""
    overlapping = complex_of(0.9)
    overlapping["interfaces"] |= {"has_clash": True}
    found = verdict_of(overlapping)
    assert (found["tone"], found["word"]) == ("poor", "Chains overlap.")
    assert "ipTM 0.90" in found["text"]
    found = verdict_of(chain([90.0] * 3, geometry={"problems": ["93% of its residues are mirror images"]}))
    assert (found["tone"], found["word"]) == ("poor", "Not the geometry of a protein.")
    assert found["text"].startswith("93% of its residues are mirror images. pTM 0.60")
    assert verdict_of(chain([90.0] * 3, geometry={"problems": "x"}, interfaces=[]))["tone"] == "good"
