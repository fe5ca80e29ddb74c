"""A command that is ended by a batch system leaves through its exits, and the handlers are as they were."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

import pytest

from fastfold.cli import main
from fastfold.cli.process import Termination, orderly_termination
from fastfold.utils.lazy import imports_without_collection
from tests.conftest import REPOSITORY
from tests.helpers.results import helix_prediction


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals have their usual effect, although the tests may run under ``nohup``."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_modules_are_imported_without_garbage_collection_and_left_out_of_later_ones() -> None:
    class Module:
        pass

    gc.unfreeze()
    try:
        with imports_without_collection():
            assert not gc.isenabled()
            made = Module()
        assert gc.isenabled()
        assert not any(one is made for one in gc.get_objects())
        gc.disable()
        with imports_without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_program_runs_what_stands_in_finally(number: signal.Signals) -> None:
    tidied = []

    def ended() -> None:
        with orderly_termination():
            try:
                assert signal.getsignal(number) is not signal.SIG_DFL
                os.kill(os.getpid(), number)
            finally:
                tidied.append(True)

    with pytest.raises(Termination) as stopped:
        ended()
    assert tidied
    assert (str(stopped.value), stopped.value.code) == (number.name, 128 + number)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with orderly_termination():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_threads_which_hear_of_no_signals_go_on() -> None:
    done = []

    def run() -> None:
        with orderly_termination():
            done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a shell line in a folder, in which ``$FASTFOLD`` is the command."""
    environment = os.environ | {
        "FASTFOLD": f"{sys.executable} -m fastfold",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, timeout=120
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_change_how_a_command_ends(tmp_path: Path, closed: str) -> None:
    helix_prediction("t", 6).save(tmp_path / "results", plots=False)
    done = shell(f"$FASTFOLD report results {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    refused = shell(f"$FASTFOLD report missing {closed}", tmp_path)
    assert refused.returncode == 1
    assert b"bug" not in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_a_fold_with_closed_or_full_streams_ends_well(tmp_path: Path, closed: str) -> None:
    (tmp_path / "a.fasta").write_text(">T1\nMKTAYIAKQR\n")
    done = shell(f"$FASTFOLD infer a.fasta --out out --num-recycles 0 --no-plots {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "summary.tsv").exists()
    files = (path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != "log.txt")
    written = [path.read_bytes() for path in files]
    assert not any(b"elapsed" in content for content in written)


def test_a_closed_stream_gets_no_file_of_the_command() -> None:
    code = (
        "import os, sys; from fastfold.cli.process import open_standard_streams; open_standard_streams();"
        "file = os.open(sys.argv[1], os.O_RDWR); assert file > 2, file; print('x'); print('x', file=sys.stderr);"
        "assert all(os.get_inheritable(number) for number in range(3))"
    )
    line = f'exec {sys.executable} -c "{code}" {os.devnull} <&- >&- 2>&-'
    assert shell(line, REPOSITORY).returncode == 0


@pytest.mark.parametrize(
    "command",
    ["report results --table", "cite", "--version", "infer --help", "infer a --out b --print-config"],
)
def test_a_full_standard_output_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    helix_prediction("t", 6).save(tmp_path / "results", plots=False)
    monkeypatch.chdir(tmp_path)
    for buffering in (-1, 0):
        with Path("/dev/full").open("wb", buffering=buffering) as file:  # type: ignore[call-overload]
            full = TextIOWrapper(file, write_through=not buffering)
            monkeypatch.setattr(sys, "stdout", full)
            assert main(command.split()) == 1
            full.detach()
        told = capsys.readouterr().err
        assert told.startswith(
            "fastfold: cannot write to the standard output: No space left on device; print to"
        )


def test_an_error_of_a_file_prints_nothing_to_the_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "config.json")

    monkeypatch.setattr("fastfold.inference.output.used_methods.used_methods", refuse)
    assert main(["cite", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "config.json: Permission denied" in printed.err


def test_a_terminated_command_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastfold.inference.runner.run", lambda request: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["infer", "MKTAYIAKQR", "--out", "x"]) == 128 + signal.SIGTERM
    line = "stopped by SIGTERM; finished results are kept, run the same command to continue"
    assert line in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("encoding", "printed"), [("ascii", rb"\u03b1 5 \xc5"), ("cp1252", b"\\u03b1 5 \xc5")]
)
def test_letters_outside_the_output_s_encoding_are_spelled(encoding: str, printed: bytes) -> None:
    code = (
        "from fastfold.cli.process import open_standard_streams; open_standard_streams();"
        r"print('\u03b1 5 \u00c5')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, printed), ended.stderr.decode()
