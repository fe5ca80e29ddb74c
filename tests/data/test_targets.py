"""Targets: names that are safe and unique, sequences that are checked."""

from __future__ import annotations

import string
import time
from pathlib import PurePosixPath, PureWindowsPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastfold.data.targets import (
    MAX_NAME_LENGTH,
    make_chains,
    mask_unknown,
    safe_stem,
    target_from_sequence,
    unique_stems,
)
from fastfold.errors import InputError

SAFE_CHARACTERS = set(string.ascii_letters + string.digits + "._+-")
NASTY = [
    "/etc/passwd",
    "../../x",
    "..",
    ".",
    "a\0b",
    "x" * 5000,
    "@@@",
    "",
    "C:\\x",
    "NUL",
    "con.x",
    "-rf",
    ".b",
]


@pytest.mark.parametrize(
    ("identifier", "stem"),
    [
        ("1abc_A", "1abc_A"),
        ("sp|P12345|NAME_HUMAN", "sp_P12345_NAME_HUMAN"),
        ("../../etc/passwd", "etc_passwd"),
        ("/tmp/x", "tmp_x"),
        ("a/../b", "a_._b"),
        ("a\0b", "a_b"),
        ("NUL", "record_NUL"),
        ("-rf", "rf"),
    ],
)
def test_stem_stays_recognisable(identifier: str, stem: str) -> None:
    """What can be kept of an identifier is kept."""
    assert safe_stem(identifier) == stem


@given(st.text())
@example("..")
@example("x" * 5000)
@example("\ud800")
@example("." * 200 + "a")
@example("nul.fasta")
def test_stem_is_never_a_path(identifier: str) -> None:
    """No identifier makes a stem that is empty, hidden, long, an option, a path, or a Windows device."""
    stem = safe_stem(identifier)
    assert 0 < len(stem) <= MAX_NAME_LENGTH
    assert set(stem) <= SAFE_CHARACTERS
    assert stem[0] not in ".-"
    assert ".." not in stem
    assert PurePosixPath(stem).name == stem
    assert PureWindowsPath(stem).name == stem
    assert stem.split(".")[0].lower() not in {"con", "nul", "aux", "prn", "com1", "lpt9"}
    assert safe_stem(stem) == stem


@given(st.lists(st.text(st.sampled_from("aAbB/_.\0"), max_size=6), unique=True, max_size=40))
def test_stems_are_unique_where_case_does_not_count(identifiers: list[str]) -> None:
    """No two of one run's output files overwrite each other, on macOS and Windows neither."""
    stems = unique_stems(identifiers)
    assert len({stem.lower() for stem in stems}) == len(identifiers)
    assert all(len(stem) <= MAX_NAME_LENGTH for stem in stems)


def test_unique_name_does_not_depend_on_order() -> None:
    """An identifier that is safe keeps its name; the one that collides is marked, whichever comes first."""
    forward = dict(zip(["a/b", "a_b"], unique_stems(["a/b", "a_b"]), strict=True))
    backward = dict(zip(["a_b", "a/b"], unique_stems(["a_b", "a/b"]), strict=True))
    assert forward == backward
    assert forward["a_b"] == "a_b"
    assert forward["a/b"].startswith("a_b_")


def test_long_identifiers_with_one_beginning_stay_apart() -> None:
    """Cutting to the length limit cannot merge two identifiers."""
    stems = unique_stems(["x" * 5000, "x" * 5001, "x" * MAX_NAME_LENGTH])
    assert len(set(stems)) == 3
    assert stems[2] == "x" * MAX_NAME_LENGTH


@pytest.mark.parametrize("name", NASTY)
def test_api_target_takes_any_name(name: str) -> None:
    """The Python API is as safe as the FASTA reader."""
    target = target_from_sequence("MKV", name=name)
    assert target.record == name
    assert set(target.name) <= SAFE_CHARACTERS


def test_colon_joins_chains() -> None:
    """Chains are called A, B, … and lower case and blanks are accepted."""
    target = target_from_sequence("mkt\n ayi : MKV\r\nLL", name="dimer")
    assert [(chain.id, chain.sequence) for chain in target.chains] == [("A", "MKTAYI"), ("B", "MKVLL")]
    assert target.is_complex
    assert target.num_residues == 11
    assert target.warnings == ()
    assert not target_from_sequence("MKV").is_complex


def test_chain_ids_never_run_out() -> None:
    """Identifiers stay distinct beyond the 62 single characters of PDB files."""
    chains = make_chains(["A"] * 100)
    assert [chain.id for chain in chains[:3]] == ["A", "B", "C"]
    assert (chains[61].id, chains[62].id) == ("9", "AA")
    assert len({chain.id for chain in chains}) == 100


def test_unknown_letters_become_x_with_a_warning() -> None:
    """B, J, O, U, X and Z are folded as X, and the user is told where."""
    target = target_from_sequence("MBKJOUZXV")
    assert target.chains[0].sequence == "MXKXXXXXV"
    (warning,) = target.warnings
    assert warning == "B at 2, J at 4, O at 5, U at 6, Z at 7 read as X (unknown residue)"
    many = target_from_sequence("U" * 8 + ":M")
    assert "and 3 more" in many.warnings[0]
    assert many.warnings[0].startswith("chain A: ")


def test_one_stop_at_the_end_is_dropped_with_a_warning() -> None:
    """Translation tools end a sequence with '*'; it is not a reason to refuse it."""
    target = target_from_sequence("MKV*:MK")
    assert [chain.sequence for chain in target.chains] == ["MKV", "MK"]
    assert target.warnings == ("chain A: the '*' (stop) at the end is left out",)


def test_nucleotides_are_noticed() -> None:
    """A gene given instead of its protein folds, but not without a warning."""
    assert "DNA or RNA" in target_from_sequence("ATGGCGAATTCCTTAG").warnings[0]
    assert target_from_sequence("GAGAGAGAVGAGAGAGAG").warnings == ()


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ("", "lacks a sequence"),
        (" \n\t", "lacks a sequence"),
        ("MK-V", "gap '-' at position 3"),
        ("MK.V", "gap '.' at position 3"),
        ("MK1V", "digit '1' at position 3"),
        ("MK*V", r"'\*' \(stop\) at position 3"),
        ("MK**", r"'\*' \(stop\) at position 3"),
        ("*", "chain 1 of 1 is empty"),
        ("MK::V", "chain 2 of 3 is empty"),
        (":MK", "chain 1 of 2 is empty"),
        ("MK:", "chain 2 of 2 is empty"),
        ("MKé", "'é' at position 3 .* is not ASCII"),
        ("MK\0V", r"'\\x00' at position 3 of the sequence is not a residue"),
        ("MK/V", "'/' at position 3 of the sequence is not a residue"),
    ],
)
def test_bad_sequence_is_refused_with_its_place(sequence: str, message: str) -> None:
    """Nothing but residues gets through, and the message says where and what."""
    with pytest.raises(InputError, match=message):
        target_from_sequence(sequence, name="bad")


@given(st.text())
def test_any_text_is_a_target_or_an_input_error(text: str) -> None:
    """No text raises anything but InputError; what passes has only the 20 letters and X."""
    try:
        target = target_from_sequence(text, name=text)
    except InputError:
        return
    assert all(set(chain.sequence) <= set("ACDEFGHIKLMNPQRSTVWYX") for chain in target.chains)


def test_mask_unknown_leaves_known_letters() -> None:
    """Only letters outside the 20 change."""
    assert mask_unknown(string.ascii_letters) == "AXCDEFGHIXKLMNXPQRSTXVWXYX" * 2


def test_long_sequence_is_read_in_linear_time() -> None:
    """A hundred thousand residues (refused later, for their size) take no time here."""
    lines = "\n".join(["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKA"] * 1640)
    start = time.perf_counter()
    assert target_from_sequence(lines).num_residues > 100_000
    assert time.perf_counter() - start < 1.0
