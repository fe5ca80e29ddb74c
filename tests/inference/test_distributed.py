"""Several processes fold one target: the same prediction, and clear words where they are not there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import fastfold
from fastfold.cli import main
from fastfold.errors import ConfigError
from fastfold.inference.distributed import DistributedFolder, check_started, distributed_folder
from fastfold.parallel import ParallelPlan, init_distributed
from fastfold.parallel.alphafold.axial_model import AxialAlphaFold
from tests.helpers.command_line import QUICK, CommandLine
from tests.helpers.forked import Forked, fork_command, rank_environments
from tests.inference.runner.inputs import a3m

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQL"


def test_each_message_of_the_first_process_does_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    folder = object.__new__(DistributedFolder)
    folder._shared = [1]  # type: ignore[list-item]
    for name in ("_rest", "_smallest_memory", "_set_precision"):
        monkeypatch.setattr(folder, name, lambda *content, name=name: done.append((name, *content)))
    for message, content, expected in (
        ("rest", None, [("_rest",)]),
        ("memory", (3, "x"), [("_smallest_memory", 3, "x")]),
        ("precision", (0, "bf16"), [("_set_precision", 0, "bf16")]),
        ("forget", None, []),
        ("stop", None, []),
    ):
        done.clear()
        assert folder._follow(message, content) == (message != "stop")
        assert done == expected
        assert bool(folder._shared) == (message in ("rest", "memory", "precision"))


def test_two_processes_write_the_prediction_of_one(cli: CommandLine) -> None:
    """With a file that cannot be folded beside the good one: the run goes on, the first process alone speaks."""
    fasta = cli.fasta({"T1": SEQUENCE})
    alone = cli.infer(fasta)
    assert alone.code == 0, alone.err
    bad, together = cli.fasta({"T2": "MKT1"}, "bad.fasta"), cli.folder / "together"
    arguments = ["infer", *QUICK, "--parallel", "dap=2", "--device", "cpu", "--weights", cli.weights()]
    arguments += ["--out", together, bad, fasta]
    started = [fork_command(*arguments, env=environment) for environment in rank_environments(2)]
    (out, errors), (silent, _) = (process.communicate() for process in started)
    assert [process.returncode for process in started] == [1, 0], errors
    assert "1 folded, 1 failed" in out, errors
    assert silent == ""
    names = sorted(path.name for path in cli.out.iterdir())
    assert sorted(path.name for path in together.iterdir()) == sorted([*names, "failures.tsv"])
    pdb = next(name for name in names if name.endswith(".pdb"))
    ours, theirs = (_coordinates(folder / pdb) for folder in (together, cli.out))
    assert ours.shape == theirs.shape
    # Sums in another order, in float32, and three decimals in the file.
    assert np.abs(ours - theirs).max() < 0.01


def _together(cli: CommandLine, fasta: Path, *more: object) -> list[tuple[int, str]]:
    """Exit code and errors of two processes that fold a file into a folder of their own."""
    arguments = ["infer", *QUICK, "--parallel", "dap=2", "--device", "cpu", "--weights", cli.weights()]
    arguments += ["--out", cli.folder / "together", fasta, *more]
    started = [fork_command(*arguments, env=environment) for environment in rank_environments(2)]
    errors = [process.communicate()[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, errors, strict=True)]


def test_two_processes_fold_by_a_plan_and_refuse_a_budget_that_is_too_small(cli: CommandLine) -> None:
    """What the smallest plan needs of each is said; with that, and with some of it on a disk, it is the same fold."""
    fasta = cli.fasta({"T1": SEQUENCE})
    assert cli.infer(fasta).code == 0
    room = ("--host-memory", "20kB", "--offload-dir", cli.folder)
    (code, said), (other, _) = _together(cli, fasta, "--memory-budget", "1MiB", *room)
    assert (code, other) == (1, 0)
    smallest = re.search(r"too small for 23 residues; the smallest that works is ([0-9.]+) GiB", said)
    assert smallest is not None, said
    assert not list((cli.folder / "together").glob("*.pdb"))
    budget = f"{float(smallest[1]) + 0.005:.3f}GiB"
    assert [code for code, _ in _together(cli, fasta, "--memory-budget", budget, *room)] == [0, 0]
    pdb = next(name for name in cli.names() if name.endswith(".pdb"))
    ours, theirs = (_coordinates(folder / pdb) for folder in (cli.folder / "together", cli.out))
    assert np.abs(ours - theirs).max() < 0.01


def _coordinates(pdb: Path) -> np.ndarray:
    atoms = [line for line in pdb.read_text().splitlines() if line.startswith("ATOM")]
    return np.array([[float(line[start : start + 8]) for start in (30, 38, 46)] for line in atoms])


def _pair(cli: CommandLine, *arguments: object, out: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of a command on two processes."""
    weights = cli.weights(is_whole=True)
    texts = [*arguments, "--parallel", "dap=2", "--device", "cpu", "--weights", weights, "--out", out]
    started = [fork_command(*texts, env=environment) for environment in rank_environments(2)]
    printed = [process.communicate() for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, printed, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["columns", "depth", "dropout", "score", "mutate", "embed", "restraints"])
def test_other_commands_on_two_processes_write_the_files_of_one(cli: CommandLine, command: str) -> None:
    """The second process prints nothing; structures, tables and arrays are equal within float32's sums."""
    fasta, msas, weights = cli.fasta({"T1": SEQUENCE}), cli.folder / "msas", cli.weights(is_whole=True)
    msas.mkdir()
    (msas / "T1.a3m").write_text(a3m(SEQUENCE, rows=30))
    quick = [*QUICK, "--msa-dir", msas]
    if command == "score":
        folded = fastfold.predict(SEQUENCE, weights, num_recycles=0, device="cpu")
        arguments = [
            "score",
            folded.save(cli.folder / "given", plots=False)["pdb"],
            "--initial-guess",
            *QUICK,
        ]
    elif command == "mutate":
        arguments = ["mutate", fasta, *quick, "--mutations", "K2A,T3W"]
    elif command == "restraints":
        (cli.folder / "links.csv").write_text("chain1,residue1,chain2,residue2,max\nA,3,A,9,5\nA,1,A,20,6\n")
        arguments = [
            "infer",
            fasta,
            *quick,
            "--restraints",
            cli.folder / "links.csv",
            "--restraint-steps",
            "3",
        ]
        arguments += ["--restraint-leave-one-out", "--memory-budget", "8GiB"]
    elif command == "embed":
        arguments = ["embed", fasta, "--num-recycles", "1", "--msa-dir", msas]
        arguments += ["--arrays", "single,pair,msa_row,structure_module,distogram,contacts"]
    else:
        arguments = ["infer", fasta, *quick, "--sample", command, "--samples", "2"]
        arguments += ["--sample-depths", "4,8"] * (command == "depth")
        arguments += ["--save-representations", "--save-distogram"]
    alone, together = cli.folder / "alone", cli.folder / "together"
    assert cli.run(*arguments, "--device", "cpu", "--weights", weights, "--out", alone).code == 0
    (code, _, errors), (other, silent, quiet) = _pair(cli, *arguments, out=together)
    assert (code, other) == (0, 0), errors
    assert silent == ""
    assert not [line for line in quiet.splitlines() if "fastfold" in line or "error" in line]
    names = sorted(path.name for path in alone.iterdir())
    assert sorted(path.name for path in together.iterdir()) == names
    compared = 0
    for name in names:
        first, second = alone / name, together / name
        if name.endswith(".pdb"):
            assert np.abs(_coordinates(first) - _coordinates(second)).max() < 0.01
        elif name.endswith(".safetensors"):
            arrays, others = load_file(first), load_file(second)
            assert list(arrays) == list(others)
            for key, values in arrays.items():
                assert np.allclose(
                    values.astype(np.float32), others[key].astype(np.float32), atol=2e-3, rtol=2e-3
                )
        elif name.endswith(".npz"):
            with np.load(first) as arrays, np.load(second) as others:
                assert arrays.files == others.files
                for key in arrays.files:
                    assert np.allclose(
                        arrays[key].astype(np.float32), others[key].astype(np.float32), atol=2e-3, rtol=2e-3
                    )
        elif name in ("scores.tsv", "mutations.tsv"):
            for one, two in zip(_cells(first), _cells(second), strict=True):
                assert one == two or float(one) == pytest.approx(float(two), abs=0.02)
        elif name.endswith("_scores.json") and command == "restraints":
            reports = [json.loads(path.read_text())["restraints"] for path in (first, second)]
            assert len(reports[0]["restraints"]) == reports[0]["total"] == 2
            assert reports[0]["steps"] == reports[1]["steps"] == 3
            assert reports[0]["evidence"] == pytest.approx(reports[1]["evidence"], abs=0.01)
            for one, two in zip(*(report["restraints"] for report in reports), strict=True):
                assert two["distance_before"] == pytest.approx(one["distance_before"], abs=0.05)
                assert two["distance"] == pytest.approx(one["distance"], abs=0.05)
            assert reports[1]["confidence_paid"] == pytest.approx(reports[0]["confidence_paid"], abs=0.05)
        elif name.endswith("_msa.a3m"):
            assert first.read_text() == second.read_text()
        else:
            continue
        compared += 1
    assert compared >= (1 if command == "embed" else 2)


def _cells(table: Path) -> list[str]:
    return [cell for line in table.read_text().splitlines() for cell in line.split("\t")]


def test_workers_and_several_processes_exclude_each_other(cli: CommandLine) -> None:
    fasta = cli.fasta({"T1": SEQUENCE})
    done = cli.run("score", fasta, "--out", cli.out, "--parallel", "dap=2", "--workers", "2")
    assert done.code == 2
    assert "fastfold screen folds each target in one process" in done.err.splitlines()[-1]


def test_the_small_network_is_refused_before_the_first_fold(cli: CommandLine) -> None:
    arguments = [
        "infer",
        cli.fasta({"T1": SEQUENCE}),
        "--out",
        cli.out,
        "--parallel",
        "dap=2",
        "--device",
        "cpu",
    ]
    started = [fork_command(*arguments, env=environment) for environment in rank_environments(2)]
    (_, said), (_, quiet) = (process.communicate() for process in started)
    assert [process.returncode for process in started] == [2, 0], said
    assert "those of mini lack attention along an axis; leave out --parallel" in said.splitlines()[-1]
    assert quiet == ""
    assert not cli.out.exists()


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ("dap=4", "--parallel dap=4 needs 4 processes, but one process was started; run torchrun"),
        ("tp=2", "--parallel tp=2: a fold supports only dynamic axial parallelism"),
        ("dap=0", "parallel.dap: expected a number of ranks, at least 1, found 0"),
        ("dap", "--parallel dap: a fold supports only dynamic axial parallelism"),
    ],
)
def test_processes_that_are_not_there_are_asked_for(cli: CommandLine, parallel: str, message: str) -> None:
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--parallel", parallel)
    assert done.code == 2
    assert message in done.err
    assert not cli.out.exists()


def test_the_processes_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (1, 4):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        check_started(ranks)
    with pytest.raises(ConfigError, match="parallel='dap=2' needs 2 processes, but 4 processes were started"):
        check_started(2)


def test_one_process_alone_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with distributed_folder(1, torch.device("cpu")) as folder:
        assert folder is None


def test_the_second_gpu_is_current_in_one_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of folds and designs, and of training."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    current: list[torch.device] = []

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    second = torch.device("cuda:1")
    with distributed_folder(1, second):
        assert current == [second]
    with init_distributed(ParallelPlan(), second) as context:
        assert current == [second] == [context.device]
    assert not current


def _out_of_memory(arguments: list[str]) -> int:
    """``fastfold`` in which the memory of this process ends once, in the second pass, between collectives."""
    first_row, calls = AxialAlphaFold._first_row, []

    def ending(self, msa):
        calls.append(None)
        if len(calls) == 2:
            raise MemoryError
        return first_row(self, msa)

    AxialAlphaFold._first_row = ending
    return main(arguments)


@pytest.mark.parametrize(
    ("rank", "more"),
    [
        (2, ()),
        pytest.param(0, (), marks=pytest.mark.slow),
        pytest.param(2, ("--dropout",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_where_the_memory_of_a_process_ends_all_go_on_in_smaller_pieces(
    cli: CommandLine, rank: int, more: tuple[str, ...]
) -> None:
    """Whichever it is, where they were; the structures are those of one process, of the next target too."""
    fasta = cli.fasta({"T1": SEQUENCE, "T2": SEQUENCE[:-1]})
    assert cli.infer(fasta, "--num-recycles", "1", *more).code == 0
    arguments = ["infer", *QUICK, "--parallel", "dap=3", "--device", "cpu", "--weights", cli.weights(), *more]
    arguments += ["--num-recycles", "1", "--checkpoint-after", "0"]
    texts = [str(argument) for argument in [*arguments, "--out", cli.folder / "together", fasta]]
    started = [
        Forked(_out_of_memory, texts, env=environment)
        if number == rank
        else fork_command(*texts, env=environment)
        for number, environment in enumerate(rank_environments(3))
    ]
    (out, said), *others = (process.communicate(120) for process in started)
    assert [process.returncode for process in started] == [0, 0, 0], said + str(others)
    assert "2 folded" in out, said
    assert said.count("warning: T1: out of memory with a plan of") == 1, said
    assert "T1: continuing after pass 1 of an interrupted fold" in said
    for pdb in (name for name in cli.names() if name.endswith(".pdb")):
        ours, theirs = (_coordinates(folder / pdb) for folder in (cli.folder / "together", cli.out))
        assert np.abs(ours - theirs).max() < 0.01


def _failing(how: str, arguments: list[str]) -> int:
    """``fastfold`` in which the second target fails, between collectives."""
    first_row, calls = AxialAlphaFold._first_row, []

    def failing(self, msa):
        calls.append(None)
        if len(calls) < 2:
            return first_row(self, msa)
        print("failing now", file=sys.stderr, flush=True)
        if how == "dies":
            os._exit(7)
        raise KeyError(f"the reason of rank {os.environ['RANK']}")

    AxialAlphaFold._first_row = failing
    return main(arguments)


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (1, "raises"),
        (0, "dies"),
        pytest.param(0, "raises", marks=pytest.mark.slow),
        pytest.param(1, "dies", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_fails_within_a_target_ends_the_run_with_its_own_error_within_a_minute(
    cli: CommandLine, rank: int, how: str
) -> None:
    """Between the collectives of the second of three targets; the first stays, and the same command goes on."""
    fasta = cli.fasta({"T1": SEQUENCE, "T2": SEQUENCE[:-1], "T3": SEQUENCE[:-2]})
    arguments = ["infer", *QUICK, "--parallel", "dap=2", "--device", "cpu", "--weights", cli.weights()]
    texts = [str(argument) for argument in [*arguments, "--out", cli.out, fasta]]
    started = [
        Forked(_failing, how, texts, env=environment)
        if number == rank
        else fork_command(*texts, env=environment)
        for number, environment in enumerate(rank_environments(2))
    ]
    assert started[rank].stderr is not None
    said = ""
    while "failing now" not in said:
        line = started[rank].stderr.readline()
        assert line, said
        said += line
    failed = time.monotonic()
    said += started[rank].communicate()[1]
    others = started[1 - rank].communicate()[1]
    assert time.monotonic() - failed < 60
    assert all(process.returncode for process in started), said + others
    if how == "dies":
        assert started[rank].returncode == 7
    else:
        assert f"the reason of rank {rank}" in said
    assert "T1_rank_001_model_1_ptm_seed_0_scores.json" in cli.names()
    assert not any(name.startswith(("T2", "T3")) for name in cli.names())


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        # All processes would fold the same and write the same files.
        (
            [],
            "WORLD_SIZE says that 2 processes were started, but one folds without --parallel; add --parallel dap=2",
        ),
        (["--parallel", "dap=4"], "--parallel dap=4 needs 4 processes, but 2 processes were started"),
    ],
    ids=str,
)
def test_torchrun_with_another_number_of_processes_is_refused(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, parallel: list[str], message: str
) -> None:
    """Before the processes meet: there is nothing here for this one to meet."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), *parallel)
    assert done.code == 2
    assert message in done.err
    assert not cli.out.exists()
