"""Residues of restraint files: chains, proteins, and copies that an experiment cannot tell apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastfold.data.targets import Chain, Target, target_from_sequence
from fastfold.inference.restraints.residues import Residues

TRIMER = Residues(target_from_sequence("MKTAY:GSHMA:MKTAY"))


def of_records(*records: str, sequences: str = "MKTAY:GSHMA:MKTAY") -> Residues:
    target = target_from_sequence(sequences)
    chains = tuple(
        replace(chain, record=record) for chain, record in zip(target.chains, records, strict=True)
    )
    return Residues(replace(target, chains=chains))


def test_copies_of_both_ends_are_ambiguous() -> None:
    """A2–C4 may be within A, within C, or between them in two ways; the named pair is first."""
    assert TRIMER.ambiguous_pairs(1, 13) == [(1, 13), (1, 3), (11, 13), (11, 3)]
    assert TRIMER.ambiguous_pairs(11, 6) == [(11, 6), (1, 6)]
    assert TRIMER.ambiguous_pairs(5, 7) == [(5, 7)]


def test_a_residue_is_linked_to_itself_only_in_another_copy() -> None:
    assert TRIMER.ambiguous_pairs(1, 1) == [(1, 11)]
    assert TRIMER.ambiguous_pairs(1, 11) == [(1, 11)]
    with pytest.raises(ValueError, match=r"links residue B:S2 to itself, .* add a copy"):
        TRIMER.ambiguous_pairs(6, 6)


def test_proteins_are_named_by_chains_and_records() -> None:
    named = of_records("sp|P1|ONE_HUMAN", "sp|P2|TWO_HUMAN", "sp|P1|ONE_HUMAN")
    assert [named.protein_chain(name) for name in ("B", "P2", "TWO_HUMAN", "sp|P1|ONE_HUMAN", "P1")] == list(
        "BBBAA"
    )
    with pytest.raises(ValueError, match=r"unknown chain 'P3'; the target has A, B, C, sp\|P1"):
        named.protein_chain("P3")
    with pytest.raises(ValueError, match="unknown chain 'sp'"):
        named.protein_chain("sp")
    with pytest.raises(ValueError, match="'B' is chain B, and the record of chain A; rename the record"):
        of_records("B", "A", "C").protein_chain("B")
    assert of_records("B", "A", "C").protein_chain("C") == "C"
    with pytest.raises(ValueError, match="'one' may be each of the chains A, B; name the chain"):
        of_records("one", "one", "two").protein_chain("one")


def test_residues_left_out_count_as_separation() -> None:
    chain = Chain("A", "MKTY", whole="MKTAYIAKQY", regions=((1, 3), (10, 10)))
    cut = Residues(Target("cut", (chain, Chain("B", "GS")), "", "cut", ()))
    assert [cut.separation(2, 3), cut.separation(0, 1), cut.separation(3, 4)] == [7, 1, None]


def test_copies_of_a_residue_are_in_all_parts_of_its_protein() -> None:
    """``P:1-5``, ``P:4-9`` and all of ``P`` have residues 4 and 5 in common."""
    whole = "MKTAYIAKQ"
    chains = (
        Chain("A", whole[:5], whole=whole, regions=((1, 5),)),
        Chain("B", whole[3:], whole=whole, regions=((4, 9),)),
        Chain("C", whole),
        Chain("D", "GSHAY"),
    )
    parts = Residues(Target("parts", chains, "", "parts", ()))
    assert [parts.label(place) for place in parts.copies(parts.place("A", "4"))] == ["A:A4", "B:A4", "C:A4"]
    assert [parts.label(place) for place in parts.copies(parts.place("C", "2"))] == ["C:K2", "A:K2"]
    assert [parts.label(place) for place in parts.copies(parts.place("D", "4"))] == ["D:A4"]


def test_copies_in_a_structure_lack_different_residues() -> None:
    """B lacks K2, which keeps its number; C is another protein."""
    chains = (
        Chain("A", "MKTAY", indices=(1, 2, 3, 4, 5)),
        Chain("B", "MTAY", indices=(1, 3, 4, 5), copy_of="MKTAY"),
        Chain("C", "GSHA", indices=(1, 2, 3, 4)),
    )
    given = Residues(Target("given", chains, "", "given", ()))
    assert [given.copies(place) for place in (0, 1, 3, 6, 12)] == [[0, 5], [1], [3, 7], [6, 2], [12]]


def test_residues_of_parts_have_the_numbers_of_the_whole_protein() -> None:
    chain = Chain("A", "TAYQY", whole="MKTAYIAKQY", regions=((3, 5), (9, 10)))
    cut = Residues(Target("cut", (chain, Chain("B", "GS")), "", "cut", ()))
    assert [cut.place("A", "4"), cut.place("A", "Q9"), cut.place("B", "1")] == [1, 3, 5]
    assert [cut.label(4), cut.label(5)] == ["A:Y10", "B:G1"]
    with pytest.raises(ValueError, match="chain A has residues 3 to 10, found 1"):
        cut.place("A", "1")
    boltz = Residues(Target("cut", (chain,), "", "cut", ()), names=["X"])  # whose file lists TAYQY
    assert boltz.place("X", "4") == 3


def test_lists_without_chains_count_parts_in_the_whole_proteins() -> None:
    """``P:3-5:9-10`` and ``Q`` have residues 3 to 5, 9 and 10, and 11 to 13 of 13."""
    part = Chain("A", "TAYQY", whole="MKTAYIAKQY", regions=((3, 5), (9, 10)))
    residues = Residues(Target("cut", (part, Chain("B", "GSH")), "", "cut", ()))
    assert [residues.label(residues.numbered(number)) for number in ("3", "9", "10", "12")] == [
        "A:T3",
        "A:Q9",
        "A:Y10",
        "B:S2",
    ]
    assert TRIMER.numbered("1") == 0
    with pytest.raises(ValueError, match="the target has residues 1 to 13, found 0"):
        residues.numbered("0")
    with pytest.raises(ValueError, match="residue 6 of 13 is not in the parts that the target has"):
        residues.numbered("6")
    with pytest.raises(ValueError, match="the target has residues 1 to 13, found 14"):
        residues.numbered("14")


def test_unknown_residues_are_refused_and_left_out_of_pockets() -> None:
    residues = Residues(target_from_sequence("MKXAY:GS"))
    with pytest.raises(ValueError, match=r"residue A:X3 is unknown \(X\)"):
        residues.place("A", "3")
    with pytest.raises(ValueError, match=r"residue A:X3 is unknown \(X\)"):
        residues.numbered("3")
    assert residues.atoms_of_chain("A") == [0, 1, 3, 4]
    assert residues.numbered("6") == 5
    with pytest.raises(ValueError, match="the target has residues 1 to 7, found 8"):
        residues.numbered("8")
    with pytest.raises(ValueError, match="atoms such as 'K2@CA' are not supported"):
        residues.place("A", "K2@CA")


def test_residues_of_a_given_structure_are_named_as_in_its_file() -> None:
    """D330 is D330, with its insertion codes, and the gap from 52A to 310 separates its ends."""
    chain = Chain("D", "MKTAY", indices=(51, 52, 53, 310, 311), labels=("52", "52A", "53", "310", "-4"))
    named = Residues(Target("given", (chain, Chain("B", "GS")), "", "given", ()))
    assert [named.place("D", name) for name in ("52", "K52A", "310", "Y-4")] == [0, 1, 3, 4]
    assert [named.label(place) for place in (1, 4, 6)] == ["D:K52A", "D:Y-4", "B:S2"]
    assert [named.separation(2, 3), named.separation(0, 1), named.separation(4, 5)] == [257, 1, None]
    with pytest.raises(ValueError, match="chain D has residues 52 to -4, found 54"):
        named.place("D", "54")
    with pytest.raises(ValueError, match="residue 310 of chain D is A, found K310"):
        named.place("D", "K310")
    with pytest.raises(ValueError, match="unknown chain 'A'; the target has D, B"):
        named.place("A", "52")
    others = Residues(Target("given", (chain, Chain("B", "GS")), "", "given", ()), names=["X", "Y"])
    assert [others.place("X", "4"), others.label(3)] == [3, "X:A4"]
