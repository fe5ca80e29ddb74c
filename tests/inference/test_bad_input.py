"""Bad input at the level of the command: one clear message, the right exit code, and nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import os
import pickle
import re
import shutil
import signal
import stat
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fastfold.errors import OutputError
from fastfold.inference.output.prediction import Prediction
from fastfold.utils import atomic_files as files
from tests.helpers.command_line import ORACLES, CommandLine, Outcome
from tests.helpers.forked import Forked, fork_command

SEQUENCE = "MKTAYIAKQR"


def one_error(done: Outcome, code: int = 1) -> str:
    """The only error message of a command that failed as it should."""
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    errors = [line for line in done.err.splitlines() if line.startswith(("error: ", "fastfold: "))]
    assert len(errors) == 1, done.err
    return errors[0]


BAD_FASTA = {
    "empty": (b"", "input.fasta: is empty"),
    "blank": (b"\n \n", "is empty"),
    "no header": (b"MKTAYIAKQR\n", "input.fasta:1: text without a header"),
    "empty record": (b">a\n>b\nMKT\n", "input.fasta:1 (record 'a'): lacks a sequence"),
    "gap": (b">a\nMKT\nAY-AK\n", "input.fasta:3 (record 'a'): gap '-' at position 6"),
    "dot": (b">a\nMKT.AYAK\n", "gap '.' at position 4"),
    "stop inside": (b">a\nMKT*AYAK\n", "input.fasta:2 (record 'a'): '*' (stop) at position 4"),
    "digit": (b">a\n1 MKT\n", "input.fasta:2 (record 'a'): digit '1' at position 1"),
    "symbol": (b">a\nMK!T\n", "'!' at position 3 of the sequence is not a residue"),
    "NUL in the sequence": (b">a\nMK\0T\n", "input.fasta:2 (record 'a'): '\\x00' at position 3"),
    "bytes": (b">a\nMK\xe9T\n", "byte 0xE9 at position 3 of the sequence is not ASCII"),
    "letters of another script": (">a\nMKÅT\n".encode(), "input.fasta:2 (record 'a')"),
    "header of another encoding": (
        ">ä\nMKT\n".encode("latin-1"),
        "input.fasta:1 (record '\ufffd'): the name is not",
    ),
    "UTF-16": (">a\nMKT\n".encode("utf-16"), "input.fasta: is text in UTF-16"),
    "empty chain": (b">a\nMKT::AAA\n", "input.fasta:2 (record 'a'): chain 2 of 3 is empty"),
    "gzip by another name": (gzip.compress(b">a\nMKT\n"), "input.fasta: is compressed with gzip"),
    "twice the same id": (
        b">a\nMKT\n\n>a\nMKTA\n",
        "input.fasta:4 (record 'a'): the identifier was used before",
    ),
}


@pytest.mark.parametrize("case", BAD_FASTA)
def test_a_bad_fasta_file_names_file_line_and_record_and_writes_nothing_of_it(cli: CommandLine, case: str):
    content, message = BAD_FASTA[case]
    done = cli.infer(cli.fasta(content))
    error = one_error(done)
    assert message in error
    assert str(cli.folder) in error
    good = {"empty record": {"b"}, "twice the same id": {"a"}}.get(case, set())
    assert {name.split("_")[0] for name in cli.names()} == good
    assert f"{len(good)} folded, 1 failed" in done.out


@pytest.mark.parametrize("kind", ["missing", "folder", "no gzip inside", "truncated gzip"])
def test_a_fasta_path_that_cannot_be_read_says_why(cli: CommandLine, kind: str):
    path = cli.folder / "x.fasta.gz"
    message = {
        "missing": "no such file",
        "folder": "is a folder without a query",
        "no gzip inside": "is not a gzip file although its name ends in .gz",
        "truncated gzip": "is a damaged gzip file",
    }[kind]
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        packed = gzip.compress(b">a\n" + SEQUENCE.encode())
        path.write_bytes(packed[:-9] if kind == "truncated gzip" else b">a\nMKT\n")
    error = one_error(cli.infer(path))
    assert message in error
    assert str(path) in error
    assert not cli.out.exists()


def test_bad_records_and_files_do_not_keep_the_good_ones_from_being_folded(cli: CommandLine):
    bad = cli.fasta(b">x\nMK-T\n", name="bad.fasta")
    mixed = cli.fasta({"good": SEQUENCE, "gap": "MK-T"}, name="mixed.fasta")
    done = cli.infer(bad, cli.folder / "missing.fasta", mixed)
    assert done.code == 1
    assert done.out == f"1 folded, 3 failed; open {cli.out / 'report.html'}\n"
    assert done.err.count("error: ") == 3
    assert {name.split("_")[0] for name in cli.names()} == {"good"}


ODDITIES = {
    "BOM": (b"\xef\xbb\xbf>a\nMKTAYIAKQR\n", SEQUENCE, None),
    "CRLF": (b">a\r\nMKTAY\r\nIAKQR\r\n", SEQUENCE, None),
    "CR": (b">a\rMKTAYIAKQR\r", SEQUENCE, None),
    "lower case": (b">a\nmktayiakqr", SEQUENCE, None),
    "blanks": (b">a\nMKTAY IAKQR\n\n\n", SEQUENCE, None),
    "stop at the end": (b">a\nMKTAYIAKQR*\n", SEQUENCE, "the '*' (stop) at the end is left out"),
    "BJOUXZ": (b">a\nMBJOUXZT\n", "MXXXXXXT", "B at 2, J at 3, O at 4, U at 5, Z at 7 read as X"),
}


def test_harmless_oddities_are_accepted_and_doubtful_ones_are_told(cli: CommandLine):
    """In one run, each in a file and a record of its own."""
    files = [
        cli.fasta(content.replace(b">a", b">a%d" % number), name=f"{number}.fasta")
        for number, (content, _, _) in enumerate(ODDITIES.values())
    ]
    done = cli.infer(*files)
    assert done.code == 0, done.err
    for number, (case, (_, folded, warning)) in enumerate(ODDITIES.items()):
        assert cli.scores(f"a{number}")["sequences"] == [folded], case
        # A random network writes no proteins, which is said of each.
        lines = [line for line in done.err.splitlines() if "is not physical" not in line]
        assert any(f"warning: a{number}: " in line for line in lines) == (warning is not None), case
        assert warning is None or f"warning: a{number}: {warning}" in done.err


@pytest.mark.parametrize(
    "identifier",
    [
        "a/b",
        "../../up",
        "..",
        "/etc/passwd",
        "a\0b",
        "n" * 5000,
        "§$%",
        "~!@#$%^&()",
        "-rf",
    ],
    ids=["slash", "up", "dots", "absolute", "NUL", "5,000 characters", "not UTF-8", "symbols", "option"],
)
def test_no_identifier_becomes_a_path(cli: CommandLine, identifier: str):
    """Results stand in the output folder under a safe name, or the record is refused; nothing appears elsewhere."""
    weights = cli.weights()
    fasta = cli.fasta(f">{identifier}\n{SEQUENCE}\n".encode("latin-1"))
    cli.out = cli.folder / "deep" / "out"
    done = cli.infer(fasta, weights=[weights])
    if identifier.isascii():
        assert done.code == 0, done.err
        assert len(cli.names()) == 5
        assert all(len(name) < 200 and not name.startswith((".", "-")) for name in cli.names())
        (config,) = cli.out.glob("*_config.json")
        assert json.loads(config.read_text())["record"] == identifier
    else:
        assert "the name is not text in UTF-8" in one_error(done)
    expected = {fasta, weights, cli.folder / "deep", cli.out, *cli.out.rglob("*")}
    assert set(cli.folder.rglob("*")) <= expected


def test_a_hundred_thousand_residues_are_refused_at_once_with_what_would_fit(cli: CommandLine):
    rng = np.random.default_rng(0)
    giant = "".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), 100_000))
    start = time.perf_counter()
    done = cli.infer(cli.fasta({"giant": giant, "small": SEQUENCE}))
    assert time.perf_counter() - start < 15
    error = one_error(done)
    assert "record 'giant': 100,000 residues would need about " in error
    assert " GiB free, enough for about " in error
    assert "fold shorter pieces" in error
    assert "bf16" not in error  # which would not be enough either
    assert {name.split("_")[0] for name in cli.names()} == {"small"}


BAD_ALIGNMENT = {
    "another query": (
        "T1.a3m",
        ">q\nMKTAYIAKQW\n",
        "T1.a3m (record 'q'): the alignment belongs to another sequence",
    ),
    "a longer query": ("T1.a3m", ">q\nMKTAYIAKQRA\n", "(11 and 10 residues)"),
    "ragged": (
        "T1.a3m",
        f">q\n{SEQUENCE}\n>r\nMKTA\n",
        "T1.a3m:3 (record 'r'): expected 10 columns as in the query",
    ),
    "empty a3m": ("T1.a3m", "", "T1.a3m: the alignment is empty"),
    "header alone": (
        "T1.a3m",
        ">q\n",
        "T1.a3m:1 (record 'q'): the query, the first row, lacks upper-case letters",
    ),
    "gaps in the query": ("T1.a3m", ">q\nMK-TAYIAKQR\n", "the query, the first row, has gaps"),
    "strange letters": (
        "T1.a3m",
        f">q\n{SEQUENCE}\n>r\nMKTAY1AKQR\n",
        "T1.a3m:4 (record 'r'): '1' is neither",
    ),
    "empty stockholm": ("T1.sto", "", "T1.sto: the alignment is empty"),
    "stockholm without rows": ("T1.sto", "# STOCKHOLM 1.0\n//\n", "T1.sto: the alignment is empty"),
    "truncated stockholm": (
        "T1.sto",
        f"# STOCKHOLM 1.0\nq {SEQUENCE}\n",
        "T1.sto:3: the alignment is truncated",
    ),
    "stockholm of another": (
        "T1.sto",
        "# STOCKHOLM 1.0\nq MKT\n//\n",
        "the alignment belongs to another sequence",
    ),
    "empty folder": ("T1/README", "nothing", "T1: contains no alignment"),
    "several chains": (
        "T1.a3m",
        "#5,5\t1,1\n>q\nMKTAYIAKQR\n",
        "T1.a3m:1: a ColabFold alignment of 2 chains",
    ),
}


def test_a_bad_alignment_names_file_and_row_and_only_its_target_fails(cli: CommandLine):
    """In one run, each of a target of its own."""
    records = {"good": "GSHMAWLPE"}
    for number, (name, content, _) in enumerate(BAD_ALIGNMENT.values()):
        records[f"T1{number}"] = SEQUENCE
        path = cli.folder / "msas" / name.replace("T1", f"T1{number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    done = cli.infer(cli.fasta(records), "--msa-dir", cli.folder / "msas")
    assert done.code == 1
    assert "Traceback" not in done.err
    errors = [line for line in done.err.splitlines() if line.startswith(("error: ", "fastfold: "))]
    assert len(errors) == len(BAD_ALIGNMENT)
    for number, (case, (_, _, message)) in enumerate(BAD_ALIGNMENT.items()):
        # The target, not only its file.
        (error,) = (line for line in errors if f"T1{number}:" in line.split("msas")[0])
        assert message.replace("T1", f"T1{number}") in error, case
    assert {name.split("_")[0] for name in cli.names()} == {"good"}


def zipped(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def array_file(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


class Evil:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.environ["FASTFOLD_TEST_EVIL"],)


BAD_WEIGHTS = {
    "empty": (lambda good: b"", "the file is empty"),
    "truncated": (lambda good: good[: len(good) // 2], "is truncated or damaged"),
    "cut at the end": (lambda good: good[:-100], "is truncated or damaged"),
    "garbage": (lambda good: bytes(range(256)) * 40, "has an unknown format"),
    "web page": (lambda good: b"<html>403 Forbidden</html>", "is a text file, perhaps of a refused download"),
    "zip bomb": (lambda good: zipped(("a//w.npy", bytes(1 << 25))), "zip bomb or damaged"),
    "pickle": (lambda good: pickle.dumps(Evil()), "is a pickle"),
    "pickle in a checkpoint": (lambda good: saved({"model": Evil()}), "found a Python object"),
    "objects in arrays": (lambda good: array_file(x=np.array([Evil()])), "bad.npz: "),
    "another network": (lambda good: saved({"encoder.weight": torch.ones(3)}), "bad.npz: "),
    "arrays of something else": (
        lambda good: (ORACLES / "synthetic_monomer/features.npz").read_bytes(),
        "bad.npz: ",
    ),
    "compressed": (lambda good: gzip.compress(good[:1000]), "is compressed; unpack it first"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_refused_and_never_run(cli: CommandLine, case: str, monkeypatch: pytest.MonkeyPatch):
    evil = cli.folder / "evil"
    monkeypatch.setenv("FASTFOLD_TEST_EVIL", str(evil))
    make, message = BAD_WEIGHTS[case]
    path = cli.folder / "bad.npz"
    path.write_bytes(make(cli.official_weights().read_bytes()))
    error = one_error(cli.infer(cli.fasta({"T1": SEQUENCE}), weights=[path]))
    assert message in error
    assert str(path) in error
    assert not evil.exists()
    assert not cli.out.exists()


@pytest.mark.parametrize("kind", ["missing", "folder", "device"])
def test_a_weights_path_that_is_no_file_says_so(cli: CommandLine, kind: str):
    path = {"missing": cli.folder / "none.npz", "folder": cli.folder, "device": Path("/dev/zero")}[kind]
    message = {"missing": "no such file", "folder": "is a folder", "device": "is a device or pipe"}[kind]
    assert f"{path}: {message}" in one_error(cli.infer(cli.fasta({"T1": SEQUENCE}), weights=[path]))
    assert not cli.out.exists()


def test_one_bad_file_among_good_weights_stops_the_run_before_hours_are_spent(cli: CommandLine):
    bad = cli.folder / "params_model_2_ptm.npz"
    bad.write_bytes(b"")
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), weights=[cli.weights(), bad])
    assert str(bad) in one_error(done)
    assert not cli.out.exists()


def test_two_weights_of_one_name_are_refused(cli: CommandLine):
    """Their results would overwrite each other's."""
    first = cli.weights()
    second = cli.folder / "params_model_1_ptm.pt"
    shutil.copyfile(first, second)
    error = one_error(cli.infer(cli.fasta({"T1": SEQUENCE}), weights=[first, second]), code=2)
    assert f"{first} and {second} would both be named 'model_1_ptm'" in error


class TestOutputFolder:
    """Places where nothing can be written."""

    @pytest.mark.parametrize("below", ["", "below"])
    def test_a_file_in_its_place(self, cli: CommandLine, below: str):
        (cli.folder / "out").write_text("mine")
        cli.out = cli.folder / "out" / below
        error = one_error(cli.infer(cli.fasta({"T1": SEQUENCE})))
        assert f"cannot use output folder {str(cli.out)!r}" in error
        assert (cli.folder / "out").read_text() == "mine"

    def test_a_folder_that_this_user_may_not_write_to(self, cli: CommandLine, unprivileged: Path):
        cli.folder, cli.out = unprivileged, unprivileged / "closed" / "out"
        fasta, weights = cli.fasta({"T1": SEQUENCE}), cli.weights()
        (unprivileged / "closed").mkdir(mode=0o555)
        with as_nobody():
            error = one_error(cli.infer(fasta, weights=[weights]))
        assert f"cannot use output folder {str(cli.out)!r}: permission denied" in error
        assert "choose an output folder" in error

    @pytest.mark.parametrize("nth", [1, 3, 5])
    def test_a_full_disk_ends_the_run_at_the_first_write_that_fails(self, cli, monkeypatch, nth: int):
        def fsync(descriptor: int) -> None:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                calls.append(descriptor)
                if len(calls) >= nth:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        calls: list[int] = []
        fasta = cli.fasta({"T1": SEQUENCE, "T2": "GSHMAWLPE"})
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", fsync)
            error = one_error(cli.infer(fasta))
        assert "cannot write " in error
        assert "the disk is full; free some space or choose another output folder" in error
        assert "The run ends here; finished results are kept, not finished: T1, T2" in error
        assert cli.names() == []
        assert cli.infer(fasta).out.startswith("2 folded;")
        assert len(cli.names()) == 10

    def test_a_failed_run_leaves_the_results_of_an_earlier_one_whole(self, cli, monkeypatch):
        fasta = cli.fasta({"T1": SEQUENCE})
        assert cli.infer(fasta).code == 0
        before = cli.contents()

        def contents(*_, **__):
            raise OutputError("a value is not finite")

        with monkeypatch.context() as patch:
            patch.setattr(Prediction, "files", contents)
            assert cli.infer(fasta, "--seed", "1").code == 1
        assert cli.contents() == before
        assert "skipped" in cli.infer(fasta).err

    def test_what_is_not_ours_stays_in_the_place_of_a_result(self, cli: CommandLine):
        foreign = cli.out / "T1_rank_001_model_1_ptm_seed_0.pdb"
        foreign.mkdir(parents=True)
        assert cli.infer(cli.fasta({"T1": SEQUENCE})).code == 0
        assert foreign.is_dir()
        (structure,) = (path for path in cli.out.glob("T1_rank_001_*.pdb") if path.is_file())
        assert re.fullmatch(r"T1_rank_001_model_1_ptm_seed_0_[0-9a-f]{8}", structure.stem)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder that every user can reach, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="fastfold-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, where the tests run as root, whom no permission stops."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


class TestInterruption:
    """Ctrl-C, and a batch system's end of time."""

    RECYCLES = 12

    def start(self, cli: CommandLine) -> Forked:
        fasta, weights = cli.fasta({"T1": "MKTAY", "T2": "GSHMA"}), cli.weights()
        recycles = ["--num-recycles", str(self.RECYCLES), "--no-plots"]
        return fork_command("infer", fasta, "--out", cli.out, "--weights", weights, *recycles)

    @pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
    def test_in_the_middle_of_folding(self, cli: CommandLine, ended, number: signal.Signals):
        process = self.start(cli)
        ended.append(process)
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith("2/2 T2 model_1_ptm recycle 1/"):
                process.send_signal(number)
                break
        out, rest = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert out == ""
        assert "Traceback" not in rest
        by = "" if number == signal.SIGINT else " by SIGTERM"
        told = f"fastfold: stopped{by}; finished results are kept, run the same command to continue"
        assert told in " ".join(rest.split())
        # The first target is whole, of the second there is nothing, and no temporary file is left.
        assert len(cli.names()) == 5
        assert {name.split("_")[0] for name in cli.names()} == {"T1"}
        if number == signal.SIGTERM:
            return
        first = cli.contents()
        again = self.start(cli)
        ended.append(again)
        out, err = again.communicate(timeout=60)
        assert again.returncode == 0, err
        assert out == f"1 folded, 1 finished before; open {cli.out / 'report.html'}\n"
        assert "1/2 T1: finished before" in err
        assert {name: data for name, data in cli.contents().items() if name.startswith("T1")} == first
        assert len(cli.names()) == 10

    @pytest.mark.parametrize("nth", [1, 3, 8, 9, 11, 14])
    def test_while_files_are_written(self, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, nth: int):
        """At every rename: into the waiting place, of all files together, into the output folder, of the record."""

        def counted(real):
            def rename(*arguments):
                calls.append(arguments)
                if len(calls) == nth:
                    raise KeyboardInterrupt
                return real(*arguments)

            return rename

        calls: list[object] = []
        fasta = cli.fasta({"T1": SEQUENCE})
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "replace", counted(os.replace))
            done = cli.infer(fasta)
        assert done.code == 130
        assert done.err.rstrip().endswith("run the same command to continue")
        assert not [name for name in cli.names() if name.endswith(".tmp")]
        if nth <= 8:
            assert cli.names() == []
        again = cli.infer(fasta)
        # From the eighth rename on the prediction is finished, wherever its files were.
        count = "1 folded" if nth <= 8 else "0 folded, 1 finished before"
        assert (again.code, again.out) == (0, f"{count}; open {cli.out / 'report.html'}\n")
        assert len(cli.names()) == 5
        (path,) = cli.out.glob("*_scores.json")
        assert json.loads(path.read_text())["sequences"] == [SEQUENCE]
