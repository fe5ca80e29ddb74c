"""When ``fastfold infer`` folds again, and what it leaves as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fastfold.inference.output.results_folder import STATE
from fastfold.inference.output.summary import read_table
from tests.helpers.command_line import CommandLine
from tests.inference.runner.inputs import OTHER, SEQUENCE, a3m


class Finished:
    """A finished run with an alignment, to be changed and run again."""

    def __init__(self, cli: CommandLine) -> None:
        self.cli = cli
        self.msas = cli.folder / "msas"
        self.msas.mkdir()
        (self.msas / "T1.a3m").write_text(a3m(SEQUENCE))
        self.fasta = cli.fasta({"T1": SEQUENCE})
        self.weights = cli.weights()
        self.before: dict[str, int] = {}

    def run(self, *more: str | Path):
        return self.cli.infer(self.fasta, "--msa-dir", self.msas, *more, weights=[self.weights])

    def times(self) -> dict[str, int]:
        return {name: (self.cli.out / name).stat().st_mtime_ns for name in self.cli.names()}

    def untouched(self) -> bool:
        return self.times() == self.before


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a finished run, once there has been one."""
    return tmp_path_factory.mktemp("finished") / "out"


@pytest.fixture
def finished(cli: CommandLine, folded: Path) -> Finished:
    """Folded once; each test has a copy of its own, with the times of the files."""
    run = Finished(cli)
    if folded.exists():
        shutil.copytree(folded, cli.out)
    else:
        assert run.run().code == 0
        shutil.copytree(cli.out, folded)
    run.before = run.times()
    return run


def test_a_second_run_skips_what_is_finished_and_says_so(finished: Finished):
    again = finished.run()
    assert (again.code, again.out) == (
        0,
        f"0 folded, 1 finished before; open {finished.cli.out / 'report.html'}\n",
    )
    assert "1/1 T1: finished before with the same input and settings, skipped" in again.err
    assert "recycle" not in again.err
    assert finished.untouched()


def test_more_targets_join_a_finished_one_in_the_same_folder(finished: Finished):
    finished.fasta = finished.cli.fasta({"T1": SEQUENCE, "T2": OTHER})
    assert finished.run().out.startswith("1 folded, 1 finished before;")
    assert finished.cli.scores("T1")["sequences"] == [SEQUENCE]
    assert finished.cli.scores("T2")["sequences"] == [OTHER]


@pytest.mark.parametrize(
    "change", ["recycles", "seed", "precision", "alignment", "weights", "max_msa", "dropout"]
)
def test_whatever_changes_the_numbers_adds_a_prediction_to_those_that_are_there(
    finished: Finished, change: str
):
    cli = finished.cli
    before = cli.contents()
    more = {
        "recycles": ["--num-recycles", "1"],
        "seed": ["--seed", "1"],
        "precision": ["--precision", "bf16"],
        "max_msa": ["--max-msa", "6:2"],
        "dropout": ["--dropout"],
    }.get(change, [])
    if change == "alignment":
        (finished.msas / "T1.a3m").write_text(a3m(SEQUENCE, rows=5))
        before.pop("T1_coverage.json")  # that of the last alignment
    elif change == "weights":
        finished.weights = cli.weights(noise=0.01)
    done = finished.run(*more)
    assert done.code == 0
    assert done.out.startswith("1 folded;")
    assert sorted(before.values()) == sorted(set(before.values()) & set(cli.contents().values()))
    scores = [cli.scores("T1", rank) for rank in (1, 2)]
    assert scores[0]["ranking_confidence"] >= scores[1]["ranking_confidence"]
    assert len(read_table(cli.out / "summary.tsv")) == 2
    keys = {line["files"].partition("_rank_")[2][4:] for line in read_table(cli.out / "summary.tsv")}
    assert "model_1_ptm_seed_0" in keys
    if change == "seed":
        assert keys == {"model_1_ptm_seed_0", "model_1_ptm_seed_1"}
    assert finished.run(*more).out.startswith("0 folded, 1 finished before")


def test_another_sequence_of_the_same_name_gets_another_stem(finished: Finished):
    cli, before = finished.cli, finished.cli.contents()
    changed = SEQUENCE[:-1] + "W"
    finished.fasta = cli.fasta({"T1": changed})
    (finished.msas / "T1.a3m").write_text(a3m(changed))
    done = finished.run()
    assert done.out.startswith("1 folded;")
    assert "T1: " in done.err
    assert (
        "has results of another record or sequence under this name; the files of this one are named T1_"
        in done.err
    )
    assert before.items() <= cli.contents().items()
    assert len(cli.contents()) == 2 * len(before)
    assert finished.run().out.startswith("0 folded, 1 finished before")


@pytest.mark.parametrize("change", ["deleted", "damaged", "record"])
def test_a_damaged_prediction_is_made_again(finished: Finished, change: str):
    cli, before = finished.cli, finished.cli.contents()
    if change == "deleted":
        next(cli.out.glob("*.cif")).unlink()
    elif change == "damaged":
        path = next(cli.out.glob("*.pdb"))
        path.write_bytes(path.read_bytes().replace(b"ATOM", b"BTOM", 1))
    else:
        (record,) = (path for path in (cli.out / STATE / "t1").glob("*.json") if path.name != "target.json")
        record.unlink()
    assert finished.run().out.startswith("1 folded;")
    if change == "record":  # whose files these are is not known any more, so they stay
        assert before.items() <= cli.contents().items()
        assert len(cli.contents()) == 2 * len(before) - 1  # one coverage file
    else:
        assert cli.contents() == before


def test_plots_and_the_default_spelled_out_fold_nothing_again(finished: Finished):
    cli, before = finished.cli, finished.before
    done = cli.infer(
        finished.fasta,
        "--msa-dir",
        finished.msas,
        weights=[finished.weights],
        settings=["--num-recycles", "0"],
    )
    assert done.code == 0
    assert "recycle" not in done.err
    (picture,) = cli.out.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert before.items() <= finished.times().items()
    again = finished.run("--num-ensemble", "1", "--recycle-tolerance", "0", "--seeds", "0")
    assert again.out.startswith("0 folded, 1 finished before")


def test_overwriting_is_asked_for(finished: Finished):
    finished.run("--seeds", "1-2")
    assert len(read_table(finished.cli.out / "summary.tsv")) == 3
    before = finished.cli.contents()
    done = finished.run("--overwrite")
    assert done.out.startswith("1 folded;")
    (line,) = read_table(finished.cli.out / "summary.tsv")
    assert (line["seed"], line["rank"]) == ("0", "1")
    assert (len(finished.cli.names()) - 1) * 3 == len(before) - 1  # one coverage file
    assert set(finished.cli.contents().values()) <= set(before.values())


def test_names_that_look_alike_in_files_do_not_share_results(cli: CommandLine):
    assert cli.infer(cli.fasta({"a_b": SEQUENCE})).code == 0
    before = cli.contents()
    done = cli.infer(cli.fasta({"a/b": OTHER}))
    assert done.out.startswith("1 folded;")
    assert before.items() <= cli.contents().items()
    assert len(cli.contents()) == 2 * len(before)
