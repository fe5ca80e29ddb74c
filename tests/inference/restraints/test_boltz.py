"""Constraints of Boltz: names of chains, properties, and entries that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.restraints.boltz import read_boltz
from fastfold.inference.restraints.restraint import Restraint

TARGET = target_from_sequence("MKTAYIAKQR:GSHMAWLPE")
CONTACT = "constraints:\n  - contact: {token1: [A, 3], token2: [B, 4]}\n"
SEQUENCES = "sequences:\n  - protein: {id: [B1], sequence: MKTAYIAKQR}\n  - ligand: {id: L, ccd: ATP}\n"


def read(text: str, notes: list[str] | None = None) -> list[Restraint]:
    return read_boltz(Path("input.yaml"), text, TARGET, [] if notes is None else notes)[1]


def test_limits_are_of_any_atoms_and_6_angstrom_by_default() -> None:
    assert read(CONTACT) == [Restraint(2, 13, 0.0, 6.0, 1.0, "", "constraint 1", "any")]
    (pocket, *_) = read("constraints:\n  - pocket: {binder: B, contacts: [[A, 3]], max_distance: 10}\n")
    assert (pocket.high, pocket.atoms) == (10.0, "any")


def test_two_chains_of_one_name_are_refused() -> None:
    text = SEQUENCES.replace("B1", "X") + "  - protein: {id: X, sequence: GSHMAWLPE}\n" + CONTACT
    with pytest.raises(InputError, match="names two chains X; rename one"):
        read(text)


def test_chains_have_the_names_of_the_file() -> None:
    """As in Boltz' examples, whose chains are A1 and B1, with a ligand between them."""
    text = (
        SEQUENCES
        + "  - protein: {id: A, sequence: gshmawlpe}\n"
        + CONTACT.replace("[A, 3]", "[B1, 3]").replace("[B, 4]", "[A, 4]")
    )
    assert [(one.first, one.second) for one in read(text)] == [(2, 13)]
    with pytest.raises(InputError, match="unknown chain 'B'; the target has B1, A"):
        read(text.replace("[B1, 3]", "[B, 3]"))
    with pytest.raises(InputError, match="lists other proteins than the target query"):
        read(SEQUENCES + CONTACT)


def test_force_is_named_once() -> None:
    notes: list[str] = []
    forced = "\n".join(f"  - contact: {{token1: [A, {i}], token2: [B, 4], force: true}}" for i in (3, 5))
    read(f"constraints:\n{forced}\n  - contact: {{token1: [A, 7], token2: [B, 4], force: false}}\n", notes)
    (note,) = notes
    assert note.startswith(
        "'force' of constraint 1, constraint 2 is not a guarantee: every restraint is fitted"
    )
    notes.clear()
    read(CONTACT, notes)
    assert notes == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("bond: {atom1: [A, 1, CA], atom2: [B, 2, CB]}", "'bond' is not supported; contact and pocket are"),
        (
            "contact: {token1: [A, CA], token2: [B, 4]}",
            "expected a residue number such as 10 or K10, found 'CA'",
        ),
        (
            "contact: {token1: [A, 3], token2: [B, 4], distance: 6}",
            "unknown key 'distance'; contact has token1",
        ),
        ("contact: {token1: [A, 3], token2: [B, 4], force: 3}", "force: expected true or false, found 3"),
        ("contact: {token1: [A, 3]}", "expected a chain and a residue such as [A, 10], found None"),
        ("pocket: {binder: A, contacts: [[A, 3]]}", "restrains a residue to itself; name two residues"),
        ("pocket: {binder: C, contacts: [[A, 3]]}", "unknown chain 'C'; the target has A, B"),
        ("pocket: {binder: B}", "pocket: expected a list 'contacts'"),
        (
            "contact: {token1: [A, 3], token2: [B, 4], max_distance: -1}",
            "max_distance: expected a number from 0",
        ),
    ],
)
def test_unusable_constraints_are_named(entry: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read(f"{CONTACT}  - {entry}\n")
    assert f"input.yaml: has unusable restraints:\nconstraint 2: {message}" in str(error.value)
