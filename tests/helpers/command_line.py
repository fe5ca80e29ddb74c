"""Small networks, inputs and a command line for the tests of ``fastfold infer``."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import fastfold
from fastfold.cli import main
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import read_weights, save_weights
from fastfold.inference.output.results_folder import STATE
from tests.conftest import REPOSITORY
from tests.helpers.signals import interruptible

ORACLES = REPOSITORY / "tests" / "oracles"
QUICK = ("--num-recycles", "0", "--no-plots")
"""Settings for tests that do not look at recycling or pictures."""
_BLOCKS = {
    "evoformer_iteration": 2,
    "extra_msa_stack": 1,
    "template_pair_stack": 1,
    "template_embedding_iteration": 1,
}
"""Blocks of each stack in the small networks: most of their time is that of blocks."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit code and what it printed."""

    code: int
    out: str
    err: str


class CommandLine:
    """``fastfold infer`` on small networks, in one temporary folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.out = folder, folder / "out"
        self._capsys = capsys

    def fasta(self, records: Mapping[str, str] | str | bytes, name: str = "input.fasta") -> Path:
        """A FASTA file of records or of any content."""
        path = self.folder / name
        if isinstance(records, Mapping):
            records = "".join(f">{key}\n{sequence}\n" for key, sequence in records.items())
        path.write_bytes(records.encode() if isinstance(records, str) else records)
        return path

    def weights(self, name: str = "model_1_ptm", *, noise: float = 0.0, is_whole: bool = False) -> Path:
        """The network of :func:`small_weights` under an official name."""
        path = self.folder / f"params_{name}.safetensors"
        path.write_bytes(small_weights(name, noise, is_whole))
        return path

    def official_weights(self, name: str = "model_1_ptm") -> Path:
        """The network of :meth:`weights` with all blocks, in the official file format."""
        return Path(shutil.copyfile(_recorded(name), self.folder / f"params_{name}.npz"))

    def run(self, *arguments: str | Path) -> Outcome:
        """Run a command in this process, on one thread: small networks are fastest so, whatever else runs."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            torch.set_num_threads(threads)
        printed = self._capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    def infer(
        self,
        *arguments: str | Path,
        weights: Sequence[Path] | None = None,
        settings: Sequence[str] = QUICK,
    ) -> Outcome:
        """``fastfold infer`` into :attr:`out`, by the monomer network unless told otherwise."""
        chosen = [self.weights()] if weights is None else weights
        flags = [text for path in chosen for text in ("--weights", path)]
        return self.run("infer", *settings, *flags, "--out", self.out, *arguments)

    def start(self, *arguments: str | Path, **popen: Any) -> subprocess.Popen[str]:
        """A command in a process of its own; with pipes unless told otherwise."""
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | popen
        options["env"] = os.environ | {"OMP_NUM_THREADS": "1"} | (popen.get("env") or {})
        command = [sys.executable, "-m", "fastfold", *map(str, arguments)]
        return subprocess.Popen(command, cwd=REPOSITORY, preexec_fn=interruptible, **options)

    def names(self) -> list[str]:
        """Files of targets in the output folder, and temporary files anywhere in it; empty if there is no folder."""
        if not self.out.exists():
            return []
        left = {str(path.relative_to(self.out)) for path in self.out.rglob("*.tmp")}
        return sorted(
            left
            | {path.name for path in self.out.iterdir()}
            - {STATE, "summary.tsv", "report.html", "interfaces.csv", "log.txt", "failures.tsv"}
        )

    def contents(self) -> dict[str, bytes]:
        """Files of targets in the output folder with their contents."""
        return {name: (self.out / name).read_bytes() for name in self.names()}

    def load(self, name: str) -> Any:
        """A JSON file of the output folder."""
        return json.loads((self.out / name).read_text())

    def config(self, target: str, rank: int = 1) -> dict[str, Any]:
        """Settings of a target's prediction of some rank."""
        (path,) = self.out.glob(f"{target}_rank_{rank:03d}_*_config.json")
        return json.loads(path.read_text())

    def scores(self, target: str, rank: int = 1) -> dict[str, Any]:
        """Scores of a target's prediction of some rank."""
        (path,) = self.out.glob(f"{target}_rank_{rank:03d}_*_scores.json")
        return json.loads(path.read_text())


def _recorded(name: str) -> Path:
    kind = "synthetic_multimer" if "multimer" in name else "synthetic_monomer"
    return ORACLES / kind / "params.npz"


@functools.cache
def small_weights(name: str = "model_1_ptm", noise: float = 0.0, is_whole: bool = False) -> bytes:
    """The first blocks of a recorded network in a file of our own format, parameters changed by relative ``noise``.

    Such a file is opened faster than an official one. ``is_whole`` keeps all blocks.
    """
    rng = np.random.default_rng(0)
    with np.load(_recorded(name)) as archive, TemporaryDirectory() as folder:
        arrays = {key: archive[key] for key in archive.files}
        if not is_whole:
            arrays = {key: _first_blocks(key, value) for key, value in arrays.items()}
        if noise:
            for key, value in arrays.items():
                arrays[key] = (value * (1 + noise * rng.standard_normal(value.shape))).astype(value.dtype)
        official = Path(folder, f"params_{name}.npz")
        np.savez(official, **arrays)
        info, state = read_weights(official)
        if not is_whole:
            info.config.model.heads.structure_module.num_layer = 4
        own = official.with_suffix(".safetensors")
        save_weights(own, state, info.config)
        return own.read_bytes()


def small_model(name: str = "model_1_ptm") -> AlphaFold:
    """The network of :func:`small_weights` under an official name."""
    with TemporaryDirectory() as folder:
        path = Path(folder, f"params_{name}.safetensors")
        path.write_bytes(small_weights(name))
        return fastfold.load_model(path)


def _first_blocks(key: str, stacked: np.ndarray) -> np.ndarray:
    """Cut the parameters of a stack, whose first axis are its blocks; others have no such part in their name."""
    return stacked[: next((number for part, number in _BLOCKS.items() if f"/{part}/" in key), None)]


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """A command line in a folder of its own."""
    return CommandLine(tmp_path, capsys)


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes to add to; none outlives its test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
