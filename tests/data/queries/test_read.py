"""Queries in all forms: what a file, a folder and the standard input are, and that ColabFold reads them alike."""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target
from fastfold.errors import InputError
from tests.conftest import require_shared
from tests.helpers.colabfold_records import (
    CARRIED,
    assert_equal_features,
    expected,
    our_features,
    recorded_features,
)

COMPLEX = "#3,2\t2,1\n>1\t2\nMKVLA\n>a\tb\nMRVL-\n>1\nMKV--\n>2\n---LA\n>2b\n---AA\n"


def single(path: Path, **options: bool) -> Target:
    """The only target of an input without errors."""
    (target,), errors = read_targets([path], **options)
    assert not errors
    return target


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Writes an input file."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_an_a3m_is_one_target_with_its_alignment(put: Callable[..., Path]) -> None:
    """Its rows are no proteins of their own; the target is called after the file."""
    text = ">some query\nMKV\n>hit\nMaRV\n>hit again\nMaRV\n"
    for path in (put("x.a3m", text), put("y.A3M", text), put("z.a3m.gz", gzip.compress(text.encode()))):
        target = single(path)
        assert (target.record, [chain.sequence for chain in target.chains]) == (path.name[0], ["MKV"])
        assert target.alignments is not None
        (((msa,), paired),) = target.alignments
        assert msa.sequences == ("MKV", "MRV", "MRV")
        assert paired == []


def test_lengths_and_copies_of_a_complex_are_respected(put: Callable[..., Path]) -> None:
    """Copies share their alignments, and stand together."""
    target = single(put("x.a3m", COMPLEX))
    assert [chain.sequence for chain in target.chains] == ["MKV", "MKV", "LA"]
    assert [chain.id for chain in target.chains] == ["A", "B", "C"]
    assert target.alignments is not None
    first, second, third = target.alignments
    assert first is second
    assert [msa.sequences for kind in third for msa in kind] == [("LA", "AA"), ("LA", "L-")]


def test_files_without_alignments_have_none(put: Callable[..., Path]) -> None:
    """So that a folder of alignments can serve them."""
    assert single(put("x.fasta", ">x\nMKV\n")).alignments is None
    assert single(put("x.csv", "id,sequence\nx,MKV\n")).alignments is None


def test_a_folder_is_its_files_by_name(put: Callable[..., Path]) -> None:
    """All records of all files count; subfolders, hidden files and others do not."""
    put("q/b.fasta", ">b1\nMK\n>b2\nMV\n")
    put("q/a.a3m", ">x\nMKV\n")
    put("q/c.csv.gz", gzip.compress(b"id,sequence\nc1,MK:MV\n"))
    put("q/D.FA", ">d\nMK\n")
    put("q/.hidden.fasta", ">h\nMK\n")
    put("q/notes.txt", "not a query")
    put("q/inner/e.fasta", ">e\nMK\n")
    folder = put("q/e.faa", "").parent
    targets, errors = read_targets([folder])
    assert [target.record for target in targets] == ["d", "a", "b1", "b2", "c1"]
    assert [error.path for error in errors] == [folder / "e.faa"]


def test_a_folder_without_queries_is_refused(put: Callable[..., Path]) -> None:
    """It names the endings that are looked for."""
    targets, (error,) = read_targets([put("q/notes.txt", "x").parent])
    assert not targets
    assert ".fasta, .fa, .faa, .fas, .a3m, .csv, .tsv" in str(error)


@pytest.mark.parametrize(
    ("content", "records"),
    [
        (b">x\nMK\n>y\nMV\n", ["x", "y"]),
        (gzip.compress(b">x\nMK\n"), ["x"]),
        (COMPLEX.encode(), ["stdin"]),
        (b"id,sequence\nx,MK\n", ["x"]),
        (b"id\tsequence\nx\tMK\n", ["x"]),
        (b"", []),
    ],
    ids=["fasta", "gzip", "a3m of a complex", "csv", "tsv", "nothing"],
)
def test_standard_input(content: bytes, records: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what it begins like."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    targets, errors = read_targets(["-"])
    assert [target.record for target in targets] == records
    assert [str(error).split(":")[0] for error in errors] == ([] if records else ["stdin"])


def test_no_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without one says so."""
    monkeypatch.setattr("sys.stdin", None)
    _, (error,) = read_targets(["-"])
    assert "stdin: cannot be read" in str(error)


def test_descriptions_may_hold_anything(put: Callable[..., Path]) -> None:
    assert single(put("x.fasta", ">x β-lactamase é\nMKV\n")).record == "x"
    assert single(put("y.fasta", b">x \xff\xfe\nMKV\n")).record == "x"
    assert single(put("z.a3m", ">β\nMKV\n")).record == "z"


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("TNF\u03b1", "TNFalpha"),
        ("\u03b22-microglobulin", "beta2-microglobulin"),
        ("\u017d\xeddek\u2019s", "Zidek_s"),
    ],
)
def test_names_keep_their_letters_and_files_are_safe(put: Callable[..., Path], name: str, stem: str) -> None:
    af3 = {"name": name, "modelSeeds": [1], "sequences": [{"protein": {"id": "A", "sequence": "MKV"}}]}
    paths = [
        put("n.fasta", f">{name} human\nMKV\n"),
        put("n.csv", f"id,sequence\n{name},MKV\n"),
        put("n.json", json.dumps(af3)),
        put("m.json", json.dumps(af3, ensure_ascii=False)),
        put("n.yaml", f"name: {name}\nsequences:\n- protein: {{id: A, sequence: MKV}}\n"),
    ]
    for path in paths:
        target = single(path)
        assert (target.record, target.shown_name, target.name) == (name, name, stem)


def test_names_of_unknown_letters_are_refused(put: Callable[..., Path]) -> None:
    for path in (put("n.fasta", b">TNF\xe1 x\nMKV\n"), put("n.csv", b"id,sequence\nTNF\xe1,MKV\n")):
        _, (error,) = read_targets([path])
        assert "the name is not text in UTF-8; save the file as UTF-8" in str(error)
        assert error.record == "TNF\ufffd"


def test_names_that_read_alike_are_targets_of_their_own(put: Callable[..., Path]) -> None:
    names = ["\xe9", "e\u0301", "e", "\u03b1", "alpha", "\u0391", "a\u200blpha"]
    targets, errors = read_targets([put("n.fasta", "".join(f">{name}\nMKV\n" for name in names))])
    assert (errors, [target.record for target in targets]) == ([], names)
    stems = {target.name.casefold() for target in targets}
    assert len(stems) == len(names)
    assert {"e", "alpha"} <= stems
    assert [target.shown_name for target in targets] == [*names[:-1], "alpha"]


def test_comments_of_fasta_are_left_out(put: Callable[..., Path]) -> None:
    """Lines with '#', above the first record and within one."""
    assert single(put("x.fasta", "# comment\n>x\nMK\n#V\nL\n")).chains[0].sequence == "MKL"


@pytest.mark.parametrize(
    ("content", "remedy"), [(COMPLEX, "rename it to .a3m"), ("# STOCKHOLM 1.0\nq MKV\n//\n", "as ID.sto")]
)
def test_an_alignment_called_fasta_is_refused(put: Callable[..., Path], content: str, remedy: str) -> None:
    """Its hits would be folded as proteins of their own."""
    targets, (error,) = read_targets([put("x.fasta", content)])
    assert not targets
    assert "this is an alignment, not FASTA" in str(error)
    assert remedy in str(error)


def test_records_of_one_name_in_several_files_are_called_after_the_files(put: Callable[..., Path]) -> None:
    """ColabFold's rule; a name that one file has twice stays an error."""
    paths = [
        put("x.a3m", ">q\nMKV\n"),
        put("y.fasta", ">x\nMK\n"),
        put("z.csv", "id,sequence\nx,MKL\nw,MKK\n"),
    ]
    targets, errors = read_targets(paths)
    assert not errors
    assert [target.record for target in targets] == ["x", "y", "z_x", "w"]
    assert [target.chains[0].sequence for target in targets] == ["MKV", "MK", "MKL", "MKK"]
    assert targets[1].warnings == ("other files have a record 'x' too; this one is named 'y'",)
    targets, (error,) = read_targets([put("twice.fasta", ">a\nMK\n>a\nMKV\n")])
    assert [target.record for target in targets] == ["a"]
    assert "the identifier was used before" in str(error)
    targets, (error,) = read_targets([paths[1], paths[1]])
    assert "the same record is given twice; leave one out" in str(error)


def check_records(folder: Path, group: str) -> int:
    """Compares the features of a group of records; returns how many were compared."""
    record, count = expected(folder), 0
    for key, case in record[group].items():
        file, number = key.split("#")
        if not any("file" in outcome for outcome in case.get("features", {}).values()):
            continue  # refused by ColabFold
        query = record["get_queries"][file]["length"]["queries"][int(number)]
        targets, _ = read_targets([folder / "inputs" / file])
        is_list = isinstance(query["sequence"], list)
        wanted = [s.upper() for s in query["sequence"]] if is_list else query["sequence"].upper()
        found = [t for t in targets if query_of(t, is_list) == wanted]
        if not found and key == "multi.fasta#4":
            continue  # the second record of one name, which is refused
        (target,) = found
        alignments = list(target.alignments or [([], [])] * len(target.chains))
        for kind, theirs in recorded_features(folder, case):
            ours = our_features(kind, target.chains, alignments, is_complex=case["is_complex"])
            assert_equal_features(ours, theirs, f"{key} {kind}")
            count += 1
    return count


def query_of(target: Target, is_list: bool) -> str | list[str]:
    """A target's sequence as ColabFold writes it: of an A3M, each different chain once and joined."""
    letters = [chain.letters or chain.sequence for chain in target.chains]
    if is_list:
        return letters
    return "".join(dict.fromkeys(letters)) if target.alignments else ":".join(letters)


@pytest.mark.parametrize(("group", "number"), [("from_a3m", 10), ("single_sequence", 2)])
def test_carried_queries_have_colabfolds_features(group: str, number: int) -> None:
    """Odd rows, copies, duplicates and unknown letters, for both kinds of networks."""
    assert check_records(CARRIED, group) == number


@pytest.mark.parametrize(("group", "number"), [("from_a3m", 30), ("single_sequence", 36)])
def test_all_recorded_queries_have_colabfolds_features(group: str, number: int) -> None:
    """Wherever ColabFold succeeds."""
    assert check_records(require_shared("oracles_data", "colabfold_inputs"), group) == number


def test_a_second_record_of_one_name_has_colabfolds_features_too(tmp_path: Path) -> None:
    """Under a name of its own: ColabFold itself would skip it without a word."""
    folder = require_shared("oracles_data", "colabfold_inputs")
    text = (folder / "inputs" / "multi.fasta").read_text()
    before, name, after = text.rpartition(">hetero")
    (tmp_path / "multi.fasta").write_text(f"{before}{name}_2{after}")
    targets, errors = read_targets([tmp_path / "multi.fasta"])
    assert not errors
    (target,) = [target for target in targets if target.record == "hetero_2"]
    case = expected(folder)["single_sequence"]["multi.fasta#4"]
    for kind, theirs in recorded_features(folder, case):
        ours = our_features(kind, target.chains, [([], [])] * 3, is_complex=True)
        assert_equal_features(ours, theirs, kind)


REFUSED = {
    "bad_columns.csv": "1: the first line must name the columns",
    "complex_bad_numbers.a3m": "1: expected ColabFold's first line",
    "empty.fasta": "is empty",
    "monomer_comment_middle.a3m": "3 (record 'q'): '#' is neither a residue nor a gap",
    "monomer_lower_query.a3m": "1 (record 'q'): the query, the first row, has 'l' in lower case",
    "monomer_query_with_gap.a3m": "1 (record 'q'): the query, the first row, has gaps",
    "monomer_ragged.a3m": "3 (record 'hit'): expected 37 columns as in the query",
    "multi.fasta": "16 (record 'hetero'): the identifier was used before",
    "no_header.fasta": "1: text without a header",
    "non_protein.fasta": "2 (record 'with'): '|' at position 42 of the sequence: the notation of another molecule",
    "trailing_colon.fasta": "2 (record 'x'): chain 2 of 2 is empty",
}
ACCEPTED = {"monomer_comment_first.a3m", "monomer_dots.a3m", "stop_codon.fasta", "queries_a3mpath.csv"}
"""What ColabFold fails on and is clear enough."""


def test_what_colabfold_fails_on_is_refused_clearly_or_read() -> None:
    """Each error names the place and the remedy; nothing else of the recorded queries is refused."""
    folder = require_shared("oracles_data", "colabfold_inputs") / "inputs"
    refused = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix):
        targets, errors = read_targets([path])
        assert targets or errors
        assert all(isinstance(error, InputError) and error.path == path for error in errors)
        if errors:
            refused[path.name] = str(errors[0]).removeprefix(f"{path}:").strip()
    assert refused.keys() == REFUSED.keys()
    for name, message in REFUSED.items():
        assert refused[name].startswith(message)
    assert all((folder / name).exists() and name not in refused for name in ACCEPTED)


def test_a_pipe_in_a_folder_is_named_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">a\nMKV\n")
    os.mkfifo(tmp_path / "b.fasta")
    targets, (error,) = read_targets([tmp_path])
    assert [target.name for target in targets] == ["a"]
    assert "b.fasta" in str(error)
    assert "is not a regular file" in str(error)


def test_a_pipe_that_is_named_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.fasta")
    writer = threading.Thread(target=(tmp_path / "a.fasta").write_text, args=(">a\nMKV\n",), daemon=True)
    writer.start()
    targets, errors = read_targets([tmp_path / "a.fasta"])
    assert ([target.name for target in targets], errors) == (["a"], [])


def test_the_file_of_unnamed_records_may_have_any_name(tmp_path: Path) -> None:
    """A record without a name is named after the file, which the system named."""
    fasta, table = tmp_path / "protéine.fasta", tmp_path / "façade.csv"
    fasta.write_text(">\nMKV\n")
    table.write_text("id,sequence\n,MKV\nproté,MKV\n")
    targets, errors = read_targets([fasta, table])
    assert [target.record for target in targets] == ["protéine_1", "façade_1", "proté"]
    assert not errors


def test_a_sequence_may_stand_in_place_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    targets, errors = read_targets(["MKTAYIAKQRQ", "MKTAYIAKQRE:GSHM", Path("MKTAYIAKQ")])
    assert [[chain.sequence for chain in target.chains] for target in targets] == [
        ["MKTAYIAKQRQ"],
        ["MKTAYIAKQRE", "GSHM"],
    ]
    assert len({target.name for target in targets}) == 2
    assert targets[0].warnings == ("no file is called MKTAYIAKQRQ, which is read as a sequence",)
    assert "no such file" in str(errors[0])
    Path("MKTAYIAKQRQ").write_text(">a\nMKV\n")
    assert single(Path("MKTAYIAKQRQ")).record == "a"


def test_a_record_that_is_given_twice_is_left_out_by_its_reader_and_not_renamed(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put("x.fasta", ">a\nMKV\n>a\nMKL\n")
    monkeypatch.chdir(path.parent)
    targets, errors = read_targets([path, "x.fasta"])
    assert [target.name for target in targets] == ["a"]
    assert [str(error) for error in errors] == [
        f"{path}:3 (record 'a'): the identifier was used before, at {path}:1; rename one of the two",
        "x.fasta:1 (record 'a'): the same record is given twice; leave one out",
        f"x.fasta:3 (record 'a'): the identifier was used before, at {path}:1; rename one of the two",
    ]
