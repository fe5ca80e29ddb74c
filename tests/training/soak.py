"""Kills a training run of two processes over and over, fills its disk once, and compares what it ends as.

One of its samples is broken. Either process or both are killed with SIGKILL, at random moments from their start to the
middle of a checkpoint; the other one has to end by itself. Then the run is finished, and its weights and losses have to
be those of a run that nothing happened to, byte for byte. Run it as ``python -m tests.training.soak [kills] [folder]``.

In a folder on a small file system of its own (``mount -t tmpfs -o size=64m tmpfs FOLDER``) the disk is filled;
elsewhere files cannot become longer than so much for a while.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import fastfold.training.run
from fastfold.cli import main
from fastfold.training.logging.loggers import read_json_lines
from tests.helpers.forked import Forked, rank_environments
from tests.training.conftest import TINY, write_data

PROCESSES = 2
STEPS_PER_KILL = 8
SMALL_FILE_SYSTEM = 1 << 30
LONGEST_FILE = 64 << 10
"""In bytes; less than a process's part of a checkpoint, more than a log."""

WEIGHTS = "mini.safetensors"


def train(arguments: Sequence[str], longest_file: int | None) -> int:
    """One process of the run, without the report that takes longer than all of it."""
    if longest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (longest_file, longest_file))
    fastfold.training.run.write_report = lambda out: out / "report"
    return main(list(arguments))


class Soak:
    """A run that is killed.

    Args:
        folder: For its data and its results.
        kills: How often it is killed.
        seed: Of the moments.
    """

    def __init__(self, folder: Path, kills: int, seed: int = 0) -> None:
        self._folder, self._rng = folder, random.Random(seed)
        self._steps = (kills + 4) * STEPS_PER_KILL
        self._out = folder / "soaked"
        self.figures = {"kills": 0, "kills_of_both": 0, "full_disks": 0, "starts": 0, "steps": self._steps}
        self._data = write_data(folder / "data")
        (self._data / "msas").mkdir()
        (self._data / "msas" / "helix1.a3m").write_text(">q\nWWWWWWWWWWWWWWWW\n")

    def start(self, out: Path, longest_file: int | None = None) -> list[Forked]:
        """Start the processes of a run."""
        command = ["train", *TINY, f"data.directory={self._data}", f"trainer.out={out}", "optim.batch_size=2"]
        command += [f"trainer.steps={self._steps}", "trainer.checkpoint_every=3", "trainer.log_every=1"]
        command += ["data.single_sequence_probability=0", "logger.csv=false", "logger.tensorboard=false"]
        return [Forked(train, command, longest_file, env=env) for env in rank_environments(PROCESSES)]

    def finish(self, out: Path) -> str:
        """Let a run come to its end; returns what it printed."""
        processes = self.start(out)
        printed = ["".join(process.communicate()) for process in processes]
        assert [process.returncode for process in processes] == [0] * PROCESSES, printed
        return printed[0]

    def step(self) -> int:
        """The last step that was logged."""
        path = self._out / "metrics.jsonl"
        entries = read_json_lines(path) if path.is_file() else []
        return max((entry["step"] for entry in entries), default=0)

    def kill(self, until: int) -> None:
        """Start the run and kill it at a random moment, at the latest when it logs step ``until``."""
        processes, began = self.start(self._out), time.monotonic()
        self.figures["starts"] += 1
        before = self.step()
        if self._rng.random() < 0.3:  # while it starts
            moment, wanted = self._rng.uniform(0.0, 6.0), until
        else:
            moment, wanted = float("inf"), min(until, before + self._rng.randint(1, 2 * STEPS_PER_KILL))
        while time.monotonic() - began < moment and self.step() < wanted:
            assert all(process.poll() is None for process in processes), _said(processes)
            assert time.monotonic() - began < 300, "no step was made"
            time.sleep(0.01)
        time.sleep(self._rng.uniform(0.0, 0.1))
        victims = self._rng.choice([[0], [1], [0, 1]])
        for victim in victims:
            processes[victim].kill()
        _said(processes)
        assert all(process.returncode != 0 for process in processes)
        self.figures["kills"] += 1
        self.figures["kills_of_both"] += len(victims) == PROCESSES

    def fill_disk(self) -> None:
        """Continue the run on a disk without room, until it has noticed."""
        size = os.statvfs(self._folder)
        ballast = self._folder / "ballast"
        before = self.step()
        small = size.f_blocks * size.f_frsize < SMALL_FILE_SYSTEM
        processes, began = self.start(self._out, None if small else LONGEST_FILE), time.monotonic()
        self.figures["starts"] += 1

        def noticed() -> bool:
            """Whether a process ended, or a checkpoint failed."""
            if any(process.poll() is not None for process in processes):
                return True
            entries = read_json_lines(self._out / "metrics.jsonl")
            return any("could not be written" in entry.get("event", "") for entry in entries)

        while small and self.step() < before + 2:
            assert time.monotonic() - began < 300, "no step was made"
            time.sleep(0.01)
        if small:
            _fill(ballast)
        while not noticed():
            assert time.monotonic() - began < 300, "the disk was full, and nobody noticed"
            time.sleep(0.01)
        for process in processes if not small else ():
            process.kill()
        said = _said(processes)
        assert all(process.returncode != 0 for process in processes), said
        assert "No space left" in said or "disk is full" in said or "File too large" in said, said
        ballast.unlink(missing_ok=True)
        self.figures["full_disks"] += 1

    def run(self) -> dict[str, int]:
        """Everything; returns how often what happened.

        Raises:
            AssertionError: The run ended as another one, or not when it should.
        """
        kills = self._steps // STEPS_PER_KILL - 4
        for kill in range(kills):
            self.kill((kill + 2) * STEPS_PER_KILL)
            if kill == kills // 2:
                self.fill_disk()
        self.finish(self._out)
        self.figures["starts"] += 1
        whole = self._folder / "whole"
        self.finish(whole)
        assert (self._out / "quarantine.tsv").read_text().startswith("helix1\t")
        assert losses(self._out) == losses(whole)
        assert (self._out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
        names = sorted(path.name for path in (self._out / "checkpoints").iterdir())
        assert names == sorted(path.name for path in (whole / "checkpoints").iterdir())
        return self.figures


def losses(out: Path) -> list[tuple[int, float]]:
    """Of every step."""
    return [(e["step"], e["loss"]) for e in read_json_lines(out / "metrics.jsonl") if "loss" in e]


def _said(processes: Sequence[Forked]) -> str:
    """What processes printed, when all have ended."""
    return "".join("".join(process.communicate(timeout=120)) for process in processes)


def _fill(path: Path) -> None:
    """Take all the room that is left."""
    with open(path, "wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"\0" * size)
            except OSError:
                size //= 2


if __name__ == "__main__":
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    place = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp())
    print(Soak(place, times).run())
    shutil.rmtree(place, ignore_errors=True)
