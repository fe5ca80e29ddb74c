"""Several processes fold one target: the same prediction, and clear words where they are not there."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from fastfold.cli import main
from tests.inference.conftest import QUICK, CommandLine
from tests.parallel import launch

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQL"


def _infer(rank: int, size: int, port: int, arguments: list[str], folder: str) -> None:
    """One process of those that torchrun would start: the same command, and where to meet in the environment."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with open(f"{folder}/out_{rank}", "w") as sys.stdout, open(f"{folder}/err_{rank}", "w") as sys.stderr:
        code = main(arguments)
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_two_processes_write_the_prediction_of_one(cli: CommandLine) -> None:
    """With a file that cannot be folded beside the good one: the run goes on, the first process alone speaks."""
    fasta = cli.fasta({"T1": SEQUENCE})
    alone = cli.infer(fasta)
    assert alone.code == 0, alone.err
    bad, together = cli.fasta({"T2": "MKT1"}, "bad.fasta"), cli.folder / "together"
    arguments = ["infer", *QUICK, "--parallel", "dap=2", "--device", "cpu", "--weights", cli.weights()]
    arguments += ["--out", together, bad, fasta]
    texts = [str(argument) for argument in arguments]
    port = _free_port()
    started = [
        launch._context.Process(target=_infer, args=(rank, 2, port, texts, str(cli.folder)))
        for rank in range(2)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(500)
        if process.is_alive():
            process.kill()
    errors = (cli.folder / "err_0").read_text()
    assert [process.exitcode for process in started] == [1, 0], errors
    assert "1 folded, 1 failed" in (cli.folder / "out_0").read_text(), errors
    assert (cli.folder / "out_1").read_text() == ""
    names = sorted(path.name for path in cli.out.iterdir())
    assert sorted(path.name for path in together.iterdir()) == names
    pdb = next(name for name in names if name.endswith(".pdb"))
    ours, theirs = (_coordinates(folder / pdb) for folder in (together, cli.out))
    assert ours.shape == theirs.shape
    # Sums in another order, in float32, and three decimals in the file.
    assert np.abs(ours - theirs).max() < 0.01


def _coordinates(pdb: Path) -> np.ndarray:
    atoms = [line for line in pdb.read_text().splitlines() if line.startswith("ATOM")]
    return np.array([[float(line[start : start + 8]) for start in (30, 38, 46)] for line in atoms])


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ("dap=4", "--parallel dap=4 needs 4 processes, but one process was started; run torchrun"),
        ("tp=2", "--parallel tp=2: a fold is spread by dynamic axial parallelism alone"),
        ("dap=0", "parallel.dap is a number of ranks, at least 1, got 0"),
        ("dap", "--parallel dap: a fold is spread by dynamic axial parallelism alone"),
    ],
)
def test_processes_that_are_not_there_are_asked_for(cli: CommandLine, parallel: str, message: str) -> None:
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--parallel", parallel)
    assert done.code == 1
    assert message in done.err
    assert not cli.out.exists()


def test_torchrun_without_parallel_is_refused(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes would fold the same and write the same files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = cli.infer(cli.fasta({"T1": SEQUENCE}))
    assert done.code == 1
    assert "2 processes were started" in done.err
