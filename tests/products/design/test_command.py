"""``fastfold design``: files, tables, resuming, and messages for wrong use."""

from __future__ import annotations

import argparse
import csv
import functools
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastfold.errors import ConfigError
from fastfold.evoformer.weights.checkpoint import load_model
from fastfold.inference import models
from fastfold.inference.config import InferConfig
from fastfold.products.design.command import add_design_command, run_design
from fastfold.products.design.command_task import PROTOCOLS, TaskOptions, design_task
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.run import SEQUENCES, TABLE
from fastfold.products.design.tasks.layout import draw_numbers
from fastfold.products.design.tasks.task import DesignTask
from fastfold.protein import residue_constants as rc
from fastfold.utils.command_line.from_fields import from_options
from tests.helpers.command_line import CommandLine
from tests.helpers.results import helix_prediction

SHORT = ("--steps", "1,1,1", "--mutations", "1,2")


def design(cli: CommandLine, *arguments: str | Path, weights: str = "model_1_ptm"):
    return cli.run("design", *arguments, "--out", cli.out, "--weights", cli.weights(weights))


def table(cli: CommandLine) -> list[dict[str, str]]:
    with (cli.out / TABLE).open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_a_design_has_one_chain_unless_copies_are_asked_for() -> None:
    parser = argparse.ArgumentParser()
    add_design_command(parser.add_subparsers())
    for copies, words in ((1, ()), (3, ("--copies", "3"))):
        options = parser.parse_args(["design", "hallucinate", "--length", "12", "--out", "x", *words])
        task = design_task(from_options(TaskOptions, options))
        assert isinstance(task, DesignTask)
        assert [len(chain.sequence) for chain in task.target.chains] == [12] * copies


@pytest.mark.long
def test_a_hallucination_is_designed_folded_and_listed(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(
        models, "load_model", lambda path, **given: loaded.append(path) or load_model(path, **given)
    )
    done = design(cli, "hallucinate", "--length", "10", *SHORT, "--num-designs", "2", "--forbid", "C")
    assert done.code == 0, done.err
    rows = table(cli)
    assert {row["name"] for row in rows} == {"hallucinate_seed_000", "hallucinate_seed_001"}
    assert [float(row["plddt"]) for row in rows] == sorted(
        (float(row["plddt"]) for row in rows), reverse=True
    )
    for row in rows:
        assert len(row["sequence"]) == 10
        assert set(row["sequence"]) <= set(rc.restypes) - {"C"}
        assert float(row["rmsd"]) >= 0
        log = [json.loads(line) for line in (cli.out / "trajectories" / f"{row['name']}.jsonl").open()]
        assert [one["stage"] for one in log] == ["soft", "temperature", "hard", "mutate"]
        assert (cli.out / "trajectories" / f"{row['name']}.pdb").read_text().count("MODEL") == 4
        assert (cli.out / "trajectories" / f"{row['name']}.png").read_bytes().startswith(b"\x89PNG")
    assert rows[0]["sequence"] in (cli.out / SEQUENCES).read_text()
    assert (cli.out / "report.html").exists()
    assert "2 designed" in done.out
    assert len(loaded) == 1
    written = (cli.out / "log.txt").read_text()
    assert "no alignments given" not in written
    wanted = ("2 designs on cpu", "hallucinate_seed_001: step 4 of 4", "2 targets on cpu", "2 designed")
    assert [text in written for text in wanted] == [True] * 4


@pytest.mark.slow
def test_a_stopped_run_continues_to_equal_files(cli: CommandLine, tmp_path: Path) -> None:
    arguments = ("hallucinate", "--length", "10", *SHORT)
    assert design(cli, *arguments).code == 0
    names = (SEQUENCES, TABLE, "trajectories/hallucinate_seed_000.jsonl")
    first = [(cli.out / name).read_bytes() for name in names]
    kept = tmp_path / "kept.safetensors"
    shutil.copy(cli.out / "trajectories" / "hallucinate_seed_000.safetensors", kept)
    shutil.rmtree(cli.out)
    (cli.out / "trajectories").mkdir(parents=True)
    shutil.copy(kept, cli.out / "trajectories" / "hallucinate_seed_000.safetensors")
    again = design(cli, *arguments)
    assert "continues after step 4" in again.out
    assert [(cli.out / name).read_bytes() for name in names] == first
    other = design(cli, *arguments, "--learning-rate", "0.2")
    assert other.code == 2
    assert "belongs to a design with other settings" in other.err
    assert design(cli, *arguments, "--learning-rate", "0.2", "--overwrite").code == 0
    (cli.out / "trajectories" / "hallucinate_seed_000.safetensors").write_bytes(b"damaged")
    for more in ((), ("--overwrite",)):
        damaged = design(cli, *arguments, *more)
        assert damaged.code == 1
        assert "hallucinate_seed_000.safetensors: cannot be read" in damaged.err


FAKE = """
import pathlib, sys
out, pdb = map(pathlib.Path, sys.argv[1:])
assert "ATOM" in pdb.read_text()
(out / "seqs").mkdir()
letters = "ACDEFGHIKL", "AAAAAAAAAA"
records = [">native\\nGGGGGGGGGG", *(f">sample={i}, score=1.5\\n{one}" for i, one in enumerate(letters))]
(out / "seqs" / "x.fa").write_text("\\n".join(records))
"""


@pytest.mark.slow
def test_sequences_of_another_program_are_folded_and_filtered(cli: CommandLine) -> None:
    program = cli.folder / "fake.py"
    program.write_text(FAKE)
    filters = cli.folder / "filters.json"
    filters.write_text(json.dumps({"Average_pLDDT": {"threshold": 0.99, "higher": True}}))
    done = design(
        cli,
        *(
            "hallucinate",
            "--length",
            "10",
            "--steps",
            "1,0,0",
            "--charge",
            "-20",
            "0",
            "--composition",
            "A<=0.9",
        ),
        *(
            "--mpnn",
            f"{sys.executable} {program} {{out}} {{pdb}}",
            "--predict-seeds",
            "2",
            "--filters",
            filters,
        ),
    )
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in table(cli)}
    assert rows.keys() == {"hallucinate_seed_000", "hallucinate_seed_000_mpnn_1"}
    made = rows["hallucinate_seed_000_mpnn_1"]
    assert (made["sequence"], made["program_score"], made["folds"]) == ("ACDEFGHIKL", "1.5000", "2")
    assert made["charge"] == "-1"
    assert all(row["filters"].startswith("Average_pLDDT 0.") for row in rows.values())
    assert "1 left out because they break --composition or --charge" in done.out
    assert "0 of 2 designs pass the filters" in done.out


@pytest.mark.long
def test_bindcrafts_files_run(cli: CommandLine) -> None:
    given = helix_prediction("target", 12).save(cli.folder / "given", plots=False)["pdb"]
    settings, advanced = cli.folder / "target.json", cli.folder / "advanced.json"
    content = {"starting_pdb": str(given), "chains": "A", "target_hotspot_residues": "3", "lengths": [12, 12]}
    settings.write_text(json.dumps({**content, "binder_name": "x"}))
    steps = ("soft_iterations", "temporary_iterations", "hard_iterations", "greedy_iterations")
    changed = dict.fromkeys(steps, 1) | {
        "num_recycles_design": 0,
        "num_recycles_validation": 0,
        "zip_plots": True,
    }
    advanced.write_text(json.dumps(changed))
    done = design(
        cli,
        *(
            "binder",
            "--settings",
            settings,
            "--advanced",
            advanced,
            "--screen-steps",
            "2",
            "--give-up-below",
            "0",
        ),
        weights="model_1_multimer_v3",
    )
    assert done.code == 0, done.err
    assert "target.json: not used: binder_name" in done.out
    assert "advanced.json: not used: zip_plots" in done.out
    (log,) = (cli.out / "trajectories").glob("*.jsonl")
    rows = [json.loads(line) for line in log.open()]
    assert [row["stage"] for row in rows] == ["screen", "screen", "temperature", "hard", "mutate"]
    assert rows[0].keys() >= {"plddt", "pae", "i_pae", "con", "i_con", "helix", "i_ptm", "rg"}
    assert (rows[1]["strands"], rows[-1]["hotspots"]) == (0.0, "A3")
    assert table(cli)[0]["note"].startswith("given up after step 5: ")
    wrong = design(cli, "hallucinate", "--length", "20", "--preset", "bindcraft")
    assert "BindCraft designs binders" in wrong.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "lengths"),
    [
        (("fixbb", "GIVEN", "--keep", "A2-4", "--loss", "fape=1", "rmsd=0.1"), [12]),
        (("partial", "GIVEN", "--motif", "A3-6"), [12]),
        (("hallucinate", "--length", "10", "--cyclic"), [10]),
        (("hallucinate", "--length", "10", "--copies", "2", "--loss", "pae=0.1", "i_pae=0.1"), [10, 10]),
        (("binder", "GIVEN", "--length", "6", "--cyclic"), [12, 6]),
    ],
)
def test_every_protocol_runs_to_its_end(
    cli: CommandLine, arguments: tuple[str, ...], lengths: list[int]
) -> None:
    given = helix_prediction("backbone", 12).save(cli.folder / "given", plots=False)["pdb"]
    words = [str(given) if word == "GIVEN" else word for word in arguments]
    weights = "model_1_multimer_v3" if len(lengths) > 1 else "model_1_ptm"
    done = design(cli, *words, "--steps", "1,1,1", weights=weights)
    assert done.code == 0, done.err
    (row,) = table(cli)
    chains = row["sequence"].split(":")
    assert [len(chain) for chain in chains] == lengths
    if "--copies" in arguments:
        assert chains[0] == chains[1]
    settings = json.loads(next(cli.out.glob("*_config.json")).read_text())["settings"]
    rings = {("hallucinate", True): True, ("binder", True): "B"}
    assert settings["cyclic"] == rings.get((arguments[0], "--cyclic" in arguments), False)


@pytest.mark.slow
def test_a_binder_is_folded_with_its_target(cli: CommandLine) -> None:
    given = helix_prediction("backbone", 12).save(cli.folder / "given", plots=False)["pdb"]
    filters = cli.folder / "filters.yaml"
    filters.write_text(
        "Average_pLDDT: {threshold: 1.0, higher: true}\nAverage_Off_i_pTM: {threshold: 0.0, higher: false}\n"
        "Average_RMSD: {threshold: 100, higher: false}\nAverage_Binder_pLDDT: {threshold: 1.0, higher: true}\n"
    )
    done = design(
        cli,
        *(
            "binder",
            given,
            "--length",
            "6-7",
            "--hotspots",
            "A3",
            "--steps",
            "1,0,1",
            "--flexible",
            "sidechains",
        ),
        *("--also-target", f"{given}:A:A9", "--avoid", f"{given}:A", "--filters", filters),
        weights="model_1_multimer_v3",
    )
    assert done.code == 0, done.err
    (row,) = table(cli)
    target, made = row["sequence"].split(":")
    assert len(target) == 12
    assert len(made) in (6, 7)
    assert row["iptm"]
    assert row["target_iptm"]
    assert row["off_iptm"]
    assert "target 2: Average_pLDDT" in row["filters"]
    assert "off 1: Average_Off_i_pTM" in row["filters"]
    assert "Average_RMSD" not in row["filters"]
    assert row["filters"].count("Average_Binder_pLDDT") == 1
    assert float(row["binder_rmsd"]) > 0
    records = (cli.out / SEQUENCES).read_text()
    assert [f"binder_seed_000{end}\n" in records for end in ("", "_alone", "_target_2", "_off_1")] == [
        True
    ] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hallucinate",), "hallucinate needs --length"),
        (("fixbb",), "fixbb needs a structure"),
        (("hallucinate", "x.pdb", "--length", "20"), "hallucinate takes no structure"),
        (("hallucinate", "--length", "20", "--hotspots", "A1"), "--hotspots does not belong to hallucinate"),
        (("hallucinate", "--length", "20", "--avoid", "x.pdb"), "--avoid does not belong to hallucinate"),
        (("hallucinate", "--length", "30-20"), "--length: expected a number or a range"),
        (("hallucinate", "--length", "20", "--steps", "3,4"), "--steps: expected 3 whole numbers"),
        (("hallucinate", "--length", "20", "--loss", "rg"), "--loss: expected NAME=WEIGHT"),
        (("hallucinate", "--length", "20", "--loss", "xyz=1"), "hallucinate has no loss 'xyz'"),
        (("hallucinate", "--length", "20", "--num-designs", "0"), "--num-seeds: '0' is not a whole number"),
        (("hallucinate", "--length", "20", "--num-recycles", "-1"), "is not a whole number from 0"),
        (("hallucinate", "--length", "20", "--mpnn", "none {pdb} {out}"), "--mpnn: no program 'none'"),
        (("hallucinate", "--length", "20", "--mpnn-keep-interface"), "belongs to --mpnn"),
        (("hallucinate", "--length", "20", "--mpnn-soluble"), "--mpnn-soluble belongs to --mpnn"),
        (
            ("hallucinate", "--length", "20", "--contigs", "5/A1-3"),
            "--contigs does not belong to hallucinate",
        ),
        (
            ("partial", "GIVEN", "--contigs", "5/A1-3", "--motif", "A3"),
            "--motif and --contigs exclude each other",
        ),
        (("partial", "GIVEN", "--contigs", "5/A1-3", "--length", "20"), "expected a range that overlaps 8-8"),
        (("partial", "GIVEN", "--contigs", "5/A1-3/0 7"), "expected parts of one chain such as"),
        (("binder", "GIVEN"), "binder needs --length"),
        (("binder", "GIVEN", "--redesign", "A"), "is left to bind"),
        (("hallucinate", "--length", "20", "--composition", "K<3"), "expected a limit such as KE<=0.3"),
        (("hallucinate", "--length", "20", "--charge", "3", "-3"), "a smallest and a largest one"),
        (("hallucinate", "--length", "20", "--precision", "int8"), "--precision: expected fp32 or bf16"),
        (("hallucinate", "--length", "20", "--where", "rmds<2"), "no column 'rmds'; did you mean rmsd?"),
        (("hallucinate", "--length", "20", "--start", "wildtype"), "has no given residues to start from"),
        (("fixbb", "GIVEN", "--keep", "A1-12"), "all 12 residues of"),
        (("fixbb", "missing.pdb"), "missing.pdb"),
        (("hallucinate", "--length", "201", "--copies", "2", "--cyclic"), "holds rings up to 200 residues"),
        (
            ("hallucinate", "--length", "20", "--con", "nums=3"),
            "con: expected settings such as num=2,cutoff=14",
        ),
        (("hallucinate", "--length", "20", "--con", "num=0"), "con: num: expected a whole number from 1"),
    ],
)
def test_wrong_use_is_explained(cli: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    given = helix_prediction("backbone", 12).save(cli.folder / "given", plots=False)["pdb"]
    done = design(cli, *(str(given) if word == "GIVEN" else word for word in arguments))
    assert done.code == (1 if "missing.pdb" in arguments else 2)
    assert message in done.err
    assert not cli.names()


def test_options_are_read_from_a_file(cli: CommandLine) -> None:
    config = cli.folder / "design.yaml"
    config.write_text("length: 20\nloss: [con=0.5, plddt=1]\ncharge: [-3, 0]\n")
    done = cli.run("design", "hallucinate", "--out", cli.out, "--config", config, "--print-config")
    assert done.code == 0
    wanted = {"length": "20", "loss": ["con=0.5", "plddt=1"], "charge": [-3.0, 0.0]}
    assert yaml.safe_load(done.out).items() >= wanted.items()


def test_the_help_names_every_protocol(cli: CommandLine) -> None:
    done = cli.run("design", "--help")
    assert done.code == 0
    assert all(protocol in done.out for protocol in PROTOCOLS)


def _parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_design_command(parser.add_subparsers())
    return parser.parse_args(["design", *words, "--out", "x"])


class Called:
    """Functions that make tasks, replaced by their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for name in ("fixed_backbone", "hallucination", "partial", "binder"):
            monkeypatch.setattr(f"fastfold.products.design.{name}", functools.partial(self._make, name))

    def _make(self, name: str, *given: Any, **named: Any) -> str:
        self.calls.append((name, given, named))
        return name

    def of(self, *words: str, seed: int | None = None) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """The call for a command line, or for a seed of it."""
        self.calls.clear()
        made = design_task(from_options(TaskOptions, _parsed(*words)))
        if seed is not None:
            assert callable(made)
            assert self.calls == []
            made = made(seed)
        assert [made] == [name for name, _, _ in self.calls]
        return self.calls[0]


def test_every_option_of_a_protocol_reaches_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    called, file = Called(monkeypatch), Path("s.pdb")
    shape = ("--copies", "2", "--repeats", "3", "--cyclic")
    expected = {"copies": 2, "repeats": 3, "cyclic": True, "length": 30}
    assert called.of("hallucinate", "--length", "30", *shape) == ("hallucination", (), expected)
    name, given, named = called.of("hallucinate", "--length", "30-40", seed=5)
    assert (name, given) == ("hallucination", ())
    assert named == {"copies": 1, "repeats": 1, "cyclic": False, "length": draw_numbers([(30, 40)], 5)[0]}
    words = ("fixbb", "s.pdb", "--chains", "A,B", "--keep", "A1", "--copies", "2", "--repeats", "3")
    shared = {"copies": 2, "repeats": 3}
    assert called.of(*words) == ("fixed_backbone", (file,), {"chain": ["A", "B"], "keep": "A1", **shared})
    assert called.of("fixbb", "s.pdb")[2] == {"chain": None, "keep": "", "copies": 1, "repeats": 1}
    plain = {"chain": None, "contigs": "", "copies": 1, "length": None}
    assert called.of("partial", "s.pdb", "--motif", "A1-3") == ("partial", (file, "A1-3"), plain)
    words = ("partial", "s.pdb", "--chains", "B", "--motif", "B1", "--copies", "2", "--length", "9-12")
    assert called.of(*words) == (
        "partial",
        (file, "B1"),
        plain | {"chain": "B", "copies": 2, "length": (9, 12)},
    )
    drawn = called.of("partial", "s.pdb", "--contigs", "5-9/A3-6", seed=4)
    assert drawn == ("partial", (file, ""), plain | {"contigs": "5-9/A3-6", "seed": 4})
    fixed = called.of("partial", "s.pdb", "--contigs", "5/A3-6")
    assert fixed == ("partial", (file, ""), plain | {"contigs": "5/A3-6"})


def test_every_option_of_a_binder_reaches_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Called(monkeypatch)
    words = (
        *("binder", "s.pdb", "--length", "30", "--chains", "A,B", "--hotspots", "A5", "--copies", "2"),
        *(
            "--repeats",
            "3",
            "--cyclic",
            "--flexible",
            "sidechains",
            "--also-target",
            "t.pdb:A",
            "--avoid",
            "o.pdb",
        ),
    )
    name, given, named = called.of(*words)
    assert (name, given) == ("binder", (Path("s.pdb"),))
    assert named.pop("parts").is_empty
    assert [one.path for one in named.pop("others")] == [Path("t.pdb")]
    assert [one.path for one in named.pop("avoided")] == [Path("o.pdb")]
    assert named == {
        "chains": ["A", "B"], "hotspots": "A5", "copies": 2, "repeats": 3, "cyclic": True,
        "flexible": "sidechains", "length": 30,
    }  # fmt: skip
    words = (
        *("binder", "s.pdb", "--redesign", "B,C", "--keep", "B1", "--binder-template", "backbone"),
        *("--length", "9-12"),
    )
    named = called.of(*words)[2]
    parts = named["parts"]
    assert (parts.redesign, parts.keep, parts.flexible, named["length"]) == (
        ("B", "C"),
        "B1",
        "backbone",
        (9, 12),
    )
    words = ("binder", "s.pdb", "--framework", "f.pdb", "--loops", "H:2-3=4-6")
    named = called.of(*words, seed=8)[2]
    assert (named["parts"].framework, named["parts"].loops) == (Path("f.pdb"), "H:2-3=4-6")
    assert (named["seed"], named["length"]) == (8, None)
    assert called.of("binder", "s.pdb", "--contigs", "5/A1-3")[2]["parts"].contigs == "5/A1-3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hallucinate", "s.pdb", "--length", "20"), "takes no structure"),
        (("hallucinate",), "needs --length"),
        (("hallucinate", "--length", "0"), "--length: expected a number or a range"),
        (("hallucinate", "--length", "x"), "--length: expected a number or a range"),
        (("fixbb",), "fixbb needs a structure"),
        (("fixbb", "s.pdb", "--motif", "A1"), "--motif does not belong to fixbb"),
        (("partial", "s.pdb", "--chains", "A,B"), "takes one chain"),
        (("partial", "s.pdb", "--chains", "A", "--contigs", "5/A1"), "leave out --chains"),
        (("binder", "s.pdb"), "needs --length"),
    ],
)
def test_options_of_other_protocols_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        design_task(from_options(TaskOptions, _parsed(*words)))


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ((), {}),
        (("--num-designs", "3", "--seed", "4"), {"seeds": range(4, 7)}),
        (
            ("--until", "2", "--where", "plddt>1"),
            {"until": 2, "condition": "plddt>1", "seeds": range(10_000)},
        ),
        (("--until", "2", "--num-designs", "5"), {"until": 2, "seeds": range(5)}),
        (("--filters", "f.yaml", "--overwrite"), {"filters": Path("f.yaml"), "overwrite": True}),
        (("--weights", "a.npz", "b.npz"), {"weights": (Path("a.npz"), Path("b.npz"))}),
        (("--predict-weights", "c.npz"), {"predict": (Path("c.npz"),)}),
        (
            ("--predict-seeds", "3", "--precision", "bf16"),
            {"infer": {"seeds": (0, 1, 2), "precision": "bf16"}},
        ),
        (("--recycle-mode", "sample"), {"config": {"recycle_mode": "sample"}}),
    ],
)
def test_options_of_a_run_reach_its_request(
    words: tuple[str, ...],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests: list[Any] = []
    made: Any = [None, None]
    monkeypatch.setattr(
        "fastfold.products.design.run.run_designs", lambda one, say: requests.append(one) or made
    )
    assert run_design(_parsed("hallucinate", "--length", "20", *words)) == 0
    assert "2 designed. Table: x/designs.tsv." in capsys.readouterr().out
    (request,) = requests
    plain = {
        "weights": (), "predict": None, "filters": None, "condition": None, "until": None, "redesign": None,
        "overwrite": False, "seeds": range(1), "output": Path("x"),
    }  # fmt: skip
    for name, value in (plain | changes).items():
        found = getattr(request, name)
        if name == "infer":
            assert found == replace(InferConfig(seeds=(0,)), **value)
        elif name == "config":
            assert found == DesignConfig(**value)
        else:
            assert (list(found) if name == "seeds" else found) == (
                list(value) if name == "seeds" else value
            ), name
