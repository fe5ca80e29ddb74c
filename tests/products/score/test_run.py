"""``fastfold score``: protocols, tables, and structures that cannot be scored."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from Bio.PDB import PDBParser

from fastfold.data.search.settings import SearchSources
from fastfold.data.targets import Target, target_from_sequence
from fastfold.data.templates.whole.given import GivenStructure
from fastfold.errors import ConfigError
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.inference.runner import Summary
from fastfold.inference.workers.options import ScreenOptions, Shard
from fastfold.products.score import run
from fastfold.products.score.run import (
    COLUMNS,
    TEMPLATE_RECYCLES,
    structure_targets,
    write_objects,
    write_table,
)
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.io.read import read_structure
from tests.helpers.command_line import CommandLine
from tests.helpers.results import helix_prediction


def write_helix(path: Path, *lengths: int, noise: float = 0.0) -> Path:
    """A helix per chain as a PDB file, with noise in Å."""
    protein = helix_prediction(path.stem, *lengths).protein
    moved = protein.atom_positions + np.random.default_rng(0).normal(
        0, noise or 1e-9, (len(protein.aatype), 1, 3)
    )
    path.write_text(to_pdb(type(protein)(**{**vars(protein), "atom_positions": moved})))
    return path


def table(cli: CommandLine) -> list[dict[str, str]]:
    """Rows of the table of scores."""
    return list(csv.DictReader((cli.out / "scores.tsv").read_text().splitlines(), delimiter="\t"))


def test_structures_are_scored_and_sorted(cli: CommandLine):
    """Composite is pLDDT, pTM and TM-score multiplied; the next run folds nothing."""
    folder = cli.folder / "decoys"
    folder.mkdir()
    write_helix(folder / "a.pdb", 20)
    write_helix(folder / "b.pdb", 20, noise=3.0)
    arguments = ("score", folder, "--out", cli.out, "--weights", cli.weights(), "--no-plots")
    done = cli.run(*arguments)
    assert done.code == 0, done.err
    assert done.out.startswith("2 scored; open")
    rows = table(cli)
    composites = [float(row["composite"]) for row in rows]
    assert composites == sorted(composites, reverse=True)
    assert {row["name"] for row in rows} == {"a", "b"}
    for row in rows:
        product = float(row["plddt"]) / 100 * float(row["ptm"]) * float(row["tm_score"])
        assert float(row["composite"]) == pytest.approx(product, abs=2e-4)
    assert cli.scores("a")["templates"][0]["used"] == [{"name": "a"}]
    assert cli.config("a")["settings"]["num_recycles"] == TEMPLATE_RECYCLES == 1
    assert cli.config("a")["given_structure"] == {"file": "a.pdb", "use": "template", "shows_targets": False}
    assert '"given_tm"' in (cli.out / "report.html").read_text()
    assert cli.run(*arguments).out.startswith("0 scored, 2 finished before")
    write_helix(folder / "b.pdb", 20, noise=2.0)
    assert cli.run(*arguments).out.startswith("1 scored, 1 finished before")


def test_objects_are_written_and_scored_as_files(tmp_path: Path) -> None:
    """With names of their own, and equal bytes each time; files stay where they are."""
    path = write_helix(tmp_path / "a.pdb", 9)
    structure = PDBParser(QUIET=True).get_structure("helix", path)
    inputs = [path, structure, structure, helix_prediction("p", 9)]
    found = write_objects(inputs, tmp_path / "out")
    assert [one.name for one in found] == ["a.pdb", "helix.cif", "helix_2.cif", "p.cif"]
    contents = [one.read_bytes() for one in found]
    assert [one.read_bytes() for one in write_objects(inputs, tmp_path / "out")] == contents
    first, second = read_structure(path).chains[0], read_structure(found[1]).chains[0]
    assert (first.chain_id, first.sequence) == (second.chain_id, second.sequence)
    np.testing.assert_array_equal(first.positions, second.positions)
    with pytest.raises(ConfigError, match="found int"):
        write_objects([3], tmp_path)


@pytest.mark.slow
def test_workers_score_like_one_process(cli: CommandLine):
    files = [
        write_helix(cli.folder / f"{name}.pdb", 10, noise=noise) for name, noise in (("a", 0.0), ("b", 2.0))
    ]
    arguments = ("score", *files, "--weights", cli.weights(), "--no-plots", "--num-recycles", "0", "--out")
    assert cli.run(*arguments, cli.out).code == 0
    alone = (cli.out / "scores.tsv").read_text()
    done = cli.run(*arguments, cli.folder / "other", "--workers", "1")
    assert done.code == 0, done.err
    assert (cli.folder / "other" / "scores.tsv").read_text() == alone


@pytest.mark.parametrize("name", ["model_1_ptm", "model_1_multimer_v3"])
def test_a_complex_is_one_template(cli: CommandLine, name: str):
    """Moving one chain changes the prediction, because its distance to the other chain is shown."""
    near, far = write_helix(cli.folder / "near.pdb", 12, 8), cli.folder / "far.pdb"
    lines = near.read_text().splitlines()
    moved = [
        f"{x[:30]}{float(x[30:38]) + 9:8.3f}{x[38:]}" if x[:4] == "ATOM" and x[21] == "B" else x
        for x in lines
    ]
    far.write_text("\n".join(moved) + "\n")
    flags = ("--weights", cli.weights(name), "--no-plots", "--num-recycles", "0")
    assert cli.run("score", near, far, "--out", cli.out, *flags).code == 0
    rows = {row["name"]: row for row in table(cli)}
    files = [next(cli.out.glob(f"{one}_rank_001_*.pdb")).read_text() for one in ("near", "far")]
    atoms = [[line[30:54] for line in text.splitlines() if line.startswith("ATOM")] for text in files]
    assert len(atoms[0]) == len(atoms[1])
    assert atoms[0] != atoms[1]
    assert rows["near"]["chains"] == "2"
    assert float(rows["near"]["binder_plddt"]) > 0
    assert (cli.out / "interfaces.csv").is_file()


def test_an_initial_guess_needs_no_templates(cli: CommandLine):
    file = write_helix(cli.folder / "design.pdb", 10)
    flags = ("--initial-guess", "--no-plots", "--num-recycles", "0")
    done = cli.run("score", file, "--out", cli.out, "--weights", "mini", *flags)
    assert done.code == 0, done.err
    assert table(cli)[0]["name"] == "design"
    other = CommandLine(cli.folder / "plain", cli._capsys)
    other.folder.mkdir()
    sequence = cli.scores("design")["sequences"][0]
    plain = other.infer(other.fasta({"design": sequence}), "--weights", "mini", weights=[])
    assert plain.code == 0
    assert other.scores("design")["plddt"] != cli.scores("design")["plddt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "mini"], "mini does not use any; give --weights model_1_ptm"),
        (
            ["--weights", "mini", "--initial-guess", "--show-target"],
            "--show-target shows chains as templates",
        ),
        (["--show-target"], "--show-target belongs to --initial-guess"),
        (["--templates", "x.cif"], "leave out other templates"),
    ],
)
def test_wrong_requests_are_refused(cli: CommandLine, arguments: list[str], message: str):
    done = cli.run("score", write_helix(cli.folder / "a.pdb", 10), "--out", cli.out, *arguments)
    assert done.code == 2
    assert message in done.err


def test_targets_of_files(tmp_path: Path):
    """Equal names are told apart by their folders, and each bad file is one error."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_helix(tmp_path / name / "x.pdb", 10)
    (tmp_path / "bad.pdb").write_text("nothing")
    targets, errors = structure_targets([tmp_path / "one", tmp_path / "two", tmp_path / "bad.pdb"])
    assert [target.name for target in targets] == ["one_x", "two_x"]
    assert len(errors) == 1
    assert isinstance(targets[0].scored_structure, GivenStructure)
    assert targets[0].alignments == (([], []),)
    _, errors = structure_targets([tmp_path / "one"], "initial_guess", shows_targets=True)
    assert "has one chain" in str(errors[0])


def test_structures_without_a_composite_score_are_last_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were not predicted are left out."""
    scores = {"a": None, "b": 0.25, "c": 0.75, "d": None, "e": 0.25, "f": 0.0}
    names = ["f", "e", "d", "c", "b", "a", "g"]

    def row(folder: object, target: Target, predictions: Sequence[str]) -> dict[str, Any] | None:
        if not predictions:
            return None
        return dict.fromkeys(COLUMNS) | {"name": target.name, "composite": scores[target.name]}

    monkeypatch.setattr(run, "_row", row)
    targets = [replace(target_from_sequence("MKV"), name=name) for name in names]
    path = write_table(targets, {name: ["1"] for name in scores}, tmp_path)
    lines = path.read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["name", "c", "b", "e", "f", "a", "d"]


def test_parts_of_a_job_array_fill_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part keeps the lines of the others, but not those of structures that are scored no more or failed."""
    files = [write_helix(tmp_path / f"{name}.pdb", 10) for name in "abcd"]
    composite = {"a": 0.5, "b": None, "c": 0.75, "d": 0.25}

    def row(folder: object, target: Target, predictions: Sequence[str]) -> dict[str, Any] | None:
        if not predictions:
            return None
        return dict.fromkeys(COLUMNS) | {
            "name": target.name,
            "composite": composite[target.name],
            "rmsd": 1.5,
        }

    monkeypatch.setattr(run, "_row", row)
    made: list[str] = []
    failed: list[str] = []

    def screen(request: InferRequest, workers: ScreenOptions) -> Summary:
        request.read_targets()
        failures = tuple((name, "it failed") for name in failed)
        return Summary(tuple(made), (), failures, dict.fromkeys(made, ("1",)))

    monkeypatch.setattr(run, "screen", screen)
    request = InferRequest((), tmp_path / "out")

    def table_of(names: str, part: Shard | None, inputs: Sequence[Path] = files) -> list[str]:
        made[:] = names
        protocol = run.Protocol("initial_guess")
        run.run_scores(inputs, request, protocol=protocol, workers=ScreenOptions(shard=part))
        return (tmp_path / "out" / run.TABLE).read_text().splitlines()

    whole = table_of("abcd", None)
    assert [line.split("\t")[0] for line in whole[1:]] == ["c", "a", "d", "b"]
    (tmp_path / "out" / run.TABLE).unlink()
    assert len(table_of("ac", Shard(1, 2))) == 3
    assert table_of("bd", Shard(2, 2)) == whole
    assert table_of("bd", Shard(2, 2)) == whole
    assert len(table_of("d", Shard(2, 2), files[1:])) == 4
    failed.append("b")
    assert [line.split("\t")[0] for line in table_of("d", Shard(2, 2))[1:]] == ["c", "d"]
    assert len(table_of("d", None)) == 2


@pytest.mark.parametrize(
    ("options", "searches"),
    [
        (RunOptions(), False),
        (RunOptions(msa_dir=Path("alignments")), True),
        (RunOptions(sources=SearchSources(server="http://127.0.0.1:1")), True),
    ],
)
def test_a_network_sees_alignments_that_are_asked_for_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: RunOptions, searches: bool
) -> None:
    seen: list[Any] = []
    file = write_helix(tmp_path / "a.pdb", 10)

    def fold(request: InferRequest) -> Summary:
        seen.extend(target.alignments for target in request.read_targets()[0])
        return Summary((), (), (), {})

    monkeypatch.setattr(run, "run", fold)
    request = InferRequest((), tmp_path / "out", options=options)
    run.run_scores([file], request, protocol=run.Protocol("initial_guess"))
    assert seen == [None if searches else (([], []),)]
