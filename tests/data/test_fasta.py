"""FASTA files: what is accepted, and that each bad input is named by file, line and record."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastfold.data.msa.msa import split_records
from fastfold.data.queries.fasta import parse_fasta, read_fasta
from fastfold.data.queries.read import read_targets
from fastfold.data.queries.records import QueryFile
from fastfold.errors import InputError
from fastfold.utils import text_files


def write(folder: Path, content: bytes | str, name: str = "in.fasta") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path: Path | str, **kwargs: bool) -> InputError:
    with pytest.raises(InputError) as caught:
        read_fasta(path, **kwargs)
    return caught.value


def test_multi_record_file(tmp_path: Path) -> None:
    """Each record is one target, called by the first word of its header; lines may be wrapped."""
    path = write(tmp_path, ">one some protein\nMKT\nAYI\n\n>two\nmkv\n>sp|P12345|ABC_HUMAN X\nMK:VV\n")
    one, two, three = read_fasta(path)
    assert (one.name, one.record, one.source) == ("one", "one", str(path))
    assert [chain.sequence for chain in one.chains] == ["MKTAYI"]
    assert [chain.sequence for chain in two.chains] == ["MKV"]
    assert three.name == "sp_P12345_ABC_HUMAN"
    assert three.record == "sp|P12345|ABC_HUMAN"
    assert [(chain.id, chain.sequence) for chain in three.chains] == [("A", "MK"), ("B", "VV")]


def test_several_records_as_one_complex(tmp_path: Path) -> None:
    """With complex_ a file is one target, called after the file, and chains know their records."""
    path = write(tmp_path, ">x\nMKU\n>y\nMK:VV\n>x\nMKU\n", name="my complex.fasta")
    (target,) = read_fasta(path, complex_=True)
    assert target.name == "my_complex"
    assert target.record == "my complex"
    assert [chain.id for chain in target.chains] == ["A", "B", "C", "D"]
    assert [chain.sequence for chain in target.chains] == ["MKX", "MK", "VV", "MKX"]
    assert [chain.letters for chain in target.chains] == ["MKU", "", "", "MKU"]
    assert [chain.record for chain in target.chains] == ["x", "y", "y", "x"]
    assert [chain.record_chain for chain in target.chains] == ["", "A", "B", ""]
    assert target.warnings[0].startswith("record 'x': U at 3")


def test_single_record_stays_itself_with_complex(tmp_path: Path) -> None:
    """One record is called by its identifier with and without complex_."""
    (target,) = read_fasta(write(tmp_path, ">dimer\nMK:VV\n"), complex_=True)
    assert target.name == "dimer"
    assert target.is_complex


def test_bad_record_spoils_its_complex_alone(tmp_path: Path) -> None:
    """A complex is folded whole or not at all; other files go on."""
    bad = write(tmp_path, ">a\nMK\n>b\nM1\n>c\n\n", name="bad.fasta")
    good = write(tmp_path, ">a\nMK\n>b\nMV\n", name="good.fasta")
    targets, errors = read_targets([bad, good], complex_=True)
    assert [target.name for target in targets] == ["good"]
    assert [(error.record, error.line) for error in errors] == [("b", 4), ("c", 5)]
    headless = write(tmp_path, "MKV\n>a\nMK\n>b\nMV\n", name="headless.fasta")
    targets, (error,) = read_targets([headless], complex_=True)
    assert (targets, error.line) == ([], 1)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf>one\nMKT\nAYI\n",
        b">one\r\nMKT\r\nAYI\r\n",
        b">one\rMKT\rAYI\r",
        b"\n\n>one\n  MKT\n\tAYI  ",
        b"> one\nmkt ayi",
    ],
    ids=["bom", "crlf", "cr", "blanks", "lower case"],
)
def test_variants_of_text_read_alike(tmp_path: Path, content: bytes) -> None:
    """Byte order mark, line ends, blanks and case change nothing."""
    (target,) = read_fasta(write(tmp_path, content))
    assert (target.name, target.chains[0].sequence, target.warnings) == ("one", "MKTAYI", ())


def test_gzip_is_read_where_the_name_says_so(tmp_path: Path) -> None:
    """x.fasta.gz is unpacked; a gzip called x.fasta is refused with the remedy."""
    packed = gzip.compress(b">one\nMKV\n")
    assert read_fasta(write(tmp_path, packed, "x.fasta.gz"))[0].name == "one"
    assert "gzip" in str(refusal(write(tmp_path, packed)))
    assert "let its name end in .gz" in str(refusal(write(tmp_path, packed)))
    assert "is not a gzip" in str(refusal(write(tmp_path, b">one\nMKV\n", "x.gz")))


@pytest.mark.parametrize("damage", [slice(0, 20), slice(0, 3)])
def test_damaged_gzip_is_refused(tmp_path: Path, damage: slice) -> None:
    """A truncated download is an error, never a shorter input."""
    packed = gzip.compress(b">one\n" + os.urandom(200).hex().encode())
    assert "damaged gzip" in str(refusal(write(tmp_path, packed[damage], "x.fasta.gz")))


def test_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacking stops at the size limit."""
    monkeypatch.setattr("fastfold.data.queries.fasta.MAX_FASTA_BYTES", 10_000)
    bomb = write(tmp_path, gzip.compress(b">a\n" + b"M" * 1_000_000), "x.fasta.gz")
    assert "larger than 10,000 bytes" in str(refusal(bomb))
    assert "larger than 10,000 bytes" in str(refusal(write(tmp_path, b">a\n" + b"M" * 10_001)))


@pytest.mark.parametrize(
    ("content", "line", "record", "message"),
    [
        (b"", None, None, "is empty"),
        (b"\n \n\r\n", None, None, "is empty"),
        (b"\xef\xbb\xbf", None, None, "is empty"),
        (b"\nMKTAYI\n", 2, None, "text without a header"),
        (
            b"HEADER    HYDROLASE\nATOM      1  N   MET A   1\n",
            1,
            None,
            "this is a structure, not a sequence",
        ),
        (b"\nATOM      1  N   MET A   1\n", 2, None, "'fastfold score' scores it"),
        (b"data_1ABC\n#\n", 1, None, "templates="),
        (b"MODEL_PROTEIN\n", 1, None, "text without a header"),
        (b"%PDF-1.4\n>x\nMK\n", 1, None, "text without a header"),
        (b">one\n\n>two\nMK\n", 1, "one", "lacks a sequence"),
        (b">two\nMK\n>one\n", 3, "one", "lacks a sequence"),
        (b">one\nMK\nM-V\n", 3, "one", "remove the gaps"),
        (b">one\nMK\n\nM*V\n", 4, "one", "cut the sequence there"),
        (b">one\n   1 MK\n", 2, "one", "remove the position numbers"),
        (b">one\nMK\nM\xe9V\n", 3, "one", "byte 0xE9 at position 4 of the sequence is not ASCII"),
        (">one\nMK\nM\u0394V\n".encode(), 3, "one", "'\u0394' at position 4 of the sequence is not ASCII"),
        (b">prot\xe9ine\nMK\n", 1, "prot\ufffdine", "the name is not text in UTF-8"),
        (b">one\nMK\nM\0V\n", 3, "one", r"'\x00' at position 4"),
        (b">one\nMK\nMV:\n", 3, "one", "chain 2 of 2 is empty"),
        (b">one\nMK\n>two\nMV\n>one\nMK\n", 5, "one", "was used before, at "),
        (">one\nMK\n".encode("utf-16"), None, None, "UTF-16"),
        (b"PK\x03\x04\x00\x00", 1, None, "text without a header"),
    ],
)
def test_bad_file_is_refused_by_line_and_record(
    tmp_path: Path, content: bytes, line: int | None, record: str | None, message: str
) -> None:
    """Each bad input has an error that names the file, the line and the record, and says what to do."""
    path = write(tmp_path, content)
    error = refusal(path)
    assert error.path == path
    assert error.line == line
    if record is not None:
        assert error.record == record
    assert message in str(error)
    assert str(path) in str(error)


def test_missing_file_folder_and_bad_names(tmp_path: Path) -> None:
    """What is not a readable file is refused by name."""
    assert "no such file" in str(refusal(tmp_path / "nothing.fasta"))
    assert "is a folder" in str(refusal(tmp_path))
    assert "is not a valid file name" in str(refusal("a\0b"))
    assert "cannot be read" in str(refusal(write(tmp_path, b"") / "x"))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing permission is said as such (simulated: the superuser may read everything)."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(text_files, "open", refuse, raising=False)
    assert "permissions" in str(refusal(write(tmp_path, b">a\nMK\n")))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipe_is_read(tmp_path: Path) -> None:
    """Process substitution (`<(…)`) works."""
    reader, writer = os.pipe()
    os.write(writer, b">one\nMKV\n")
    os.close(writer)
    try:
        assert read_fasta(f"/dev/fd/{reader}")[0].name == "one"
    finally:
        os.close(reader)


def test_one_bad_record_or_file_never_stops_the_others(tmp_path: Path) -> None:
    """All that can be folded is folded; each failure is reported once."""
    first = write(tmp_path, "stray\n>a\nMK\n>b\nM1\n>c\nMV\n", "first.fasta")
    second = write(tmp_path, ">d\nMK\n>a\nMM\n", "second.fasta")
    targets, errors = read_targets([first, tmp_path / "none.fasta", tmp_path / "a\0b", second])
    assert [target.record for target in targets] == ["first_a", "c", "d", "second_a"]
    assert [(error.line, error.record) for error in errors] == [
        (1, None),
        (5, "b"),
        (None, None),
        (None, None),
    ]


def test_names_are_unique_across_files(tmp_path: Path) -> None:
    """Identifiers that differ, but not as file names, give different names."""
    first = write(tmp_path, ">a/b\nMK\n>Prot\nMK\n", "first.fasta")
    second = write(tmp_path, ">a_b\nMK\n>prot\nMK\n", "second.fasta")
    targets, errors = read_targets([first, second])
    assert errors == []
    assert len({target.name.lower() for target in targets}) == 4
    assert targets[2].name == "a_b"


def test_nasty_identifiers_make_harmless_names(tmp_path: Path) -> None:
    """No identifier of a FASTA file leads a file out of the output folder."""
    identifiers = ["../../x", "/etc/passwd", "..", "a\0b", "n" * 5000, "|||", ".hidden", "a\\b"]
    path = write(tmp_path, "".join(f">{identifier} text\nMK\n" for identifier in identifiers))
    targets = read_fasta(path)
    assert [target.record for target in targets] == identifiers
    for target in targets:
        (tmp_path / f"{target.name}_x.pdb").touch()
    assert len(list(tmp_path.iterdir())) == len(identifiers) + 1


def test_record_without_a_name_is_called_after_its_file(tmp_path: Path) -> None:
    """A bare '>' is accepted with a warning."""
    one, two = read_fasta(write(tmp_path, ">\nMK\n>  \nMV\n"))
    assert (one.name, two.name) == ("in_1", "in_2")
    assert "line 3" in two.warnings[0]


def test_warnings_reach_the_target(tmp_path: Path) -> None:
    """Letters that fold as X are reported with their places."""
    (target,) = read_fasta(write(tmp_path, ">a\nMKBZ*\n"))
    assert target.chains[0].sequence == "MKXX"
    assert len(target.warnings) == 2


def test_line_numbers_count_lines_not_control_characters() -> None:
    """Form feeds and other separators that Python's splitlines honours end no line."""
    _, records = split_records(">a\x0b\x0c\x1c\x85\u2028b\nMK\n>c\n")
    assert [(record.line, record.lines) for record in records] == [(1, ["MK"]), (3, [""])]


sequences = st.text("ACDEFGHIKLMNPQRSTVWYX", min_size=1, max_size=30).filter(
    lambda s: not set(s) <= set("ACGTUN")
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.lists(st.lists(sequences, min_size=1, max_size=3), min_size=1, max_size=5),
    st.integers(1, 40),
    st.data(),
)
def test_round_trip(tmp_path: Path, chains: list[list[str]], width: int, data: st.DataObject) -> None:
    """What is written as FASTA, wrapped anywhere and in either case, is read back."""
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r", "\n\n"]))
    text = ""
    for i, record in enumerate(chains):
        joined = ":".join(record)
        joined = joined.lower() if data.draw(st.booleans()) else joined
        text += f">r{i} text{end}" + "".join(
            joined[k : k + width] + end for k in range(0, len(joined), width)
        )
    targets = read_fasta(write(tmp_path, text))
    assert [[chain.sequence for chain in target.chains] for target in targets] == chains
    assert [target.name for target in targets] == [f"r{i}" for i in range(len(chains))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    st.binary(max_size=200) | st.text(st.sampled_from(">\n\r :*-MKé\0\x1f\x8b"), max_size=60).map(str.encode)
)
def test_any_bytes_are_targets_or_input_errors(tmp_path: Path, content: bytes) -> None:
    """No file, however damaged, raises anything but InputError, in any mode and under either name."""
    for name in ("in.fasta", "in.fasta.gz"):
        path = write(tmp_path, content, name)
        for complex_ in (False, True):
            targets, errors = read_targets([path], complex_=complex_)
            assert targets or errors
            assert all(isinstance(error, InputError) and error.path == path for error in errors)


@pytest.mark.parametrize(
    "header", ["B|ccd", "C|smiles", "D|dna", "E|RNA|x", "ligand|name=one", "rna|name=two", "glycan|name=x"]
)
def test_records_of_other_molecules_are_refused(tmp_path: Path, header: str) -> None:
    """Boltz's and Chai's headers: 'ATP' is no peptide."""
    path = write(tmp_path, f">A|protein|empty\nMKT\n>{header}\nACGT\n")
    targets, (error,) = read_targets([path])
    assert [target.record for target in targets] == ["A|protein|empty"]
    assert "expected a protein, found a record of another molecule" in str(error)
    assert error.line == 3
    targets, errors = read_targets([path], complex_=True)
    assert (targets, len(errors)) == ([], 1)


def test_records_of_boltz_are_one_complex_with_the_alignments_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "b.a3m").write_text(">b\nMKV\n>1\nMRV\n")
    path = write(tmp_path, ">H|protein|b.a3m\nMKV\n>L|protein|empty\nMKT\n")
    (target,), errors = read_targets([path])
    assert not errors
    assert (target.name, [(chain.id, chain.sequence) for chain in target.chains]) == (
        "in",
        [("H", "MKV"), ("L", "MKT")],
    )
    assert target.alignments is not None
    assert [[msa.sequences for msa in own] for own, _ in target.alignments] == [[("MKV", "MRV")], []]
    file = QueryFile(path, path.read_bytes())
    (refused,) = parse_fasta(file, opens_files=False)
    assert "record 'H|protein|b.a3m' names a file, which is not opened here" in str(refused)
    path = write(tmp_path, ">H|protein|gone.a3m\nMKV\n")
    targets, (error,) = read_targets([path])
    assert not targets
    assert "no such file: 'gone.a3m'" in str(error)


def test_records_of_chai_are_one_complex(tmp_path: Path) -> None:
    path = write(tmp_path, ">protein|name=one\nMKV\n>protein|name=two\nMKT\n")
    (target,), errors = read_targets([path])
    assert (errors, [(chain.id, chain.sequence) for chain in target.chains]) == (
        [],
        [("A", "MKV"), ("B", "MKT")],
    )


def test_proteins_whose_names_resemble_molecules_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, ">rna|polymerase\nMKT\n>sp|P1|DNA\nMKV\n>protein|name=x\nMKL\n")
    assert [chain.sequence for target in read_fasta(path) for chain in target.chains] == ["MKT", "MKV", "MKL"]


def test_a_title_of_pir_is_not_folded(tmp_path: Path) -> None:
    path = write(tmp_path, ">P1;1UBQ\nTHIS IS A TITLE\nMQIFV\nKTL*\n>F1;frag\nsome title\nMKV*\n")
    one, two = read_fasta(path)
    assert (one.record, one.chains[0].sequence) == ("1UBQ", "MQIFVKTL")
    assert (two.record, two.chains[0].sequence) == ("frag", "MKV")
    error = refusal(write(tmp_path, ">DL;gene\ntitle\nACGT*\n"))
    assert "another molecule (PIR type DL)" in str(error)


def test_blanks_and_quotes_before_a_header(tmp_path: Path) -> None:
    path = write(tmp_path, " >one\nMKT\n\t>two\nMKV\n")
    assert [target.record for target in read_fasta(path)] == ["one", "two"]
    error = refusal(write(tmp_path, '>one\nMKT\n">two\nMKV"\n'))
    assert "a quotation mark precedes '>'" in str(error)
    assert error.line == 3
