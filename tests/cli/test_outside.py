"""Closed files, files that vanish, a full disk and a closed terminal, for commands other than ``infer``."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastfold.training.run
from fastfold.inference.relax import files
from fastfold.training.trainer import Trainer
from tests.cli.commands.test_relax import QUICK, structure
from tests.conftest import REPOSITORY
from tests.helpers.command_line import CommandLine
from tests.inference.runner.inputs import OTHER, SEQUENCE
from tests.inference.test_bad_input import as_nobody, unprivileged
from tests.training.conftest import TINY, write_data

__all__ = ["unprivileged"]
LONGEST_FILE = 900
"""In bytes; less than any structure."""


def full_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LONGEST_FILE, LONGEST_FILE))


def with_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(arguments: list[Any], prepare: Callable[[], None]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fastfold", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=prepare,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def hang_up(process: subprocess.Popen[str], folder: Path, pattern: str) -> None:
    """Close the terminal of a process once it has written a file, and check that it ends by that."""
    try:
        until = time.monotonic() + 90
        while not list(folder.glob(pattern)):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)  # workers have the pipe open as long as they run
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGHUP


def screen(cli: CommandLine, *more: str) -> list[Any]:
    """A screen of two targets by one worker."""
    fasta = cli.fasta({"T1": SEQUENCE, "T2": OTHER})
    settings = ("--workers", "1", "--weights", cli.weights(), "--no-plots", "--out", cli.out)
    return ["screen", fasta, *settings, *more]


def temporary(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def test_relax_names_files_that_this_user_may_not_read_or_write(cli: CommandLine, unprivileged: Path) -> None:
    closed, good = (structure(unprivileged, name, "AAA") for name in ("closed.pdb", "good.pdb"))
    cli.out = unprivileged / "out"
    cli.out.mkdir()
    cli.out.chmod(0o777)
    assert cli.run("relax", good, "--out", cli.folder, *QUICK).code == 0  # imports what root alone may read
    closed.chmod(0o000)
    with as_nobody():
        done = cli.run("relax", closed, good, "--out", cli.out, *QUICK)
        refused = cli.run("relax", good, *QUICK)
    assert done.code == refused.code == 1
    assert f"fastfold: {closed}: " in done.err
    assert "may not be read; change its permissions" in done.err
    assert done.out.endswith("1 of 2 relaxed\n")
    assert "permission denied; choose an output folder that you may write to" in refused.err
    assert "bug" not in done.err + refused.err


def test_relax_names_a_file_that_vanishes(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (structure(cli.folder, f"{name}.pdb", "AAA") for name in ("a", "b", "c"))

    def relax(*arguments: Any, **named: Any) -> Any:
        second.unlink(missing_ok=True)
        return real(*arguments, **named)

    real = files.relax
    monkeypatch.setattr(files, "relax", relax)
    done = cli.run("relax", first, second, third, "--out", cli.out, *QUICK)
    assert done.code == 1
    assert f"fastfold: {second}: " in done.err
    assert "bug" not in done.err
    assert done.out.endswith("2 of 3 relaxed\n")


@pytest.mark.slow
def test_relax_on_a_full_disk_leaves_nothing_half_written(cli: CommandLine) -> None:
    good = structure(cli.folder, "good.pdb", "AAA")
    process = start(["relax", good, "--out", cli.out, *QUICK], full_disk)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the file is larger than this system allows; choose another output folder" in said
    assert "bug" not in said
    assert list(cli.out.glob("*")) == []


@pytest.mark.slow
def test_screen_on_a_full_disk_ends_and_says_so(cli: CommandLine) -> None:
    process = start(screen(cli, "--num-recycles", "0"), full_disk)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the file is larger than this system allows; choose another output folder" in said
    assert "bug" not in said
    assert temporary(cli.out) == []
    assert list(cli.out.glob("*.pdb")) == []


@pytest.mark.slow
def test_screen_says_that_an_alignment_vanished(cli: CommandLine) -> None:
    """A target without an alignment is folded as everywhere: from its sequence, with a warning."""
    alignments = cli.folder / "msas"
    alignments.mkdir()
    for name, sequence in (("T1", SEQUENCE), ("T2", OTHER)):
        (alignments / f"{name}.a3m").write_text(f">{name}\n{sequence}\n>row\n{sequence}\n")
    process = start(screen(cli, "--msa-dir", alignments, "--num-recycles", "0"), with_terminal)
    assert process.stdout is not None
    said = ""
    while line := process.stdout.readline():
        said += line
        if "loading" in line or "T1" in line:
            (alignments / "T2.a3m").unlink(missing_ok=True)
    assert process.wait(timeout=120) == 0, said
    assert f"warning: T2: no alignment of 'T2' in {alignments}; only its sequence is used" in said
    assert "warning: T1" not in said
    assert len(list(cli.out.glob("T?_*_seed_0.pdb"))) == 2


@pytest.mark.slow
def test_screen_of_a_closed_terminal_leaves_no_worker_and_the_next_run_tidies(cli: CommandLine) -> None:
    process = start(screen(cli, "--num-recycles", "20", "--seeds", "0-99"), with_terminal)
    hang_up(process, cli.out, "*.pdb")
    finished = {path.name for path in (cli.out / ".fastfold" / "t1").glob("*.json")}
    # A worker is ended in the middle of a file; whoever opens the target next removes it.
    said, _ = start(screen(cli, "--num-recycles", "0", "--seeds", "0"), with_terminal).communicate(
        timeout=120
    )
    assert said.endswith(f"2 folded; open {cli.out / 'report.html'}\n")
    assert temporary(cli.out) == []
    assert finished < {path.name for path in (cli.out / ".fastfold" / "t1").glob("*.json")}


@pytest.mark.slow
def test_relax_of_a_closed_terminal_leaves_no_temporary_file(cli: CommandLine) -> None:
    names = [structure(cli.folder, f"f{number}.pdb", "AAA") for number in range(200)]
    process = start(["relax", *names, "--out", cli.out, *QUICK], with_terminal)
    hang_up(process, cli.out, "*_relaxed.pdb")
    assert temporary(cli.out) == []


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["closed", "vanished"])
def test_training_goes_on_without_a_sample_that_cannot_be_read(
    cli: CommandLine, unprivileged: Path, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = write_data(unprivileged / "data"), unprivileged / "run"
    out.mkdir()
    out.chmod(0o777)
    sample = data / "train" / "helix1.pdb.gz"
    monkeypatch.setattr(fastfold.training.run, "write_report", lambda folder: folder / "report")
    settings = [
        *TINY,
        f"data.directory={data}",
        "trainer.log_every=1",
        "trainer.steps=4",
        "optim.batch_size=2",
    ]
    assert cli.run("train", *settings, f"trainer.out={cli.folder / 'first'}").code == 0  # imports everything
    real = Trainer.run

    def run(trainer: Trainer) -> None:  # the folder has been listed
        if problem == "vanished":
            sample.unlink()
        real(trainer)

    sample.parent.chmod(0o777)
    if problem == "closed":
        sample.chmod(0o000)

    monkeypatch.setattr(Trainer, "run", run)
    with as_nobody():
        done = cli.run("train", *settings, f"trainer.out={out}")
    assert done.code == 0, done.err
    assert "bug" not in done.err
    assert (out / "quarantine.tsv").read_text().startswith("helix1\t")
