"""``fastfold infer`` with inputs of other programs: their alignments and seeds are used, and what is not is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import CommandLine
from tests.inference.runner.inputs import OTHER, SEQUENCE, a3m


def write(folder: Path, tree: Any, name: str = "in.json") -> Path:
    path = folder / name
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


def af3(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sequences": [{"protein": {"id": "A", "sequence": SEQUENCE, **fields}}]}


@pytest.mark.long
def test_an_alignment_in_the_input_makes_the_prediction_of_a_folder(cli: CommandLine):
    """With the same seed, for one chain and for two, of which one has none."""
    (cli.folder / "msas").mkdir()
    for name, text in (("T1", a3m(SEQUENCE, 5)), ("T2_A", a3m(SEQUENCE, 4))):
        (cli.folder / "msas" / f"{name}.a3m").write_text(text)
    assert (
        cli.infer(
            cli.fasta({"T1": SEQUENCE, "T2": f"{SEQUENCE}:{OTHER}"}), "--msa-dir", cli.folder / "msas"
        ).code
        == 0
    )
    expected = {name: cli.scores(name)["plddt"] for name in ("T1", "T2")}
    one = af3("T1", unpairedMsa=a3m(SEQUENCE, 5), pairedMsa="")
    two = af3("T2", unpairedMsaPath="msas/T2_A.a3m", pairedMsa="")
    two["sequences"].append({"protein": {"id": "B", "sequence": OTHER, "unpairedMsa": "", "pairedMsa": ""}})
    files = [write(cli.folder, tree, f"{tree['name']}.json") for tree in (one, two)]
    done = cli.infer(*files, "--overwrite")
    assert done.code == 0
    assert "no alignment of" not in done.err
    assert {name: cli.scores(name)["plddt"] for name in ("T1", "T2")} == expected
    assert cli.config("T2")["alignment_rows"] == [[4, 0], [0, 0]]


@pytest.mark.long
def test_seeds_of_the_input_are_used_unless_the_command_gives_others(cli: CommandLine):
    path = write(cli.folder, af3("T1") | {"modelSeeds": [3, 5]})
    done = cli.infer(path)
    assert done.code == 0
    assert "seeds 3, 5 of the input" in done.err
    assert sorted(record["seed"] for record in map(settings, cli.out.glob("T1*_config.json"))) == [3, 5]
    done = cli.infer(path, "--seed", "0", "--overwrite")
    assert "the seeds of the input (3, 5) are not used, but those of the command (0)" in done.err
    assert [settings(path)["seed"] for path in cli.out.glob("T1*_config.json")] == [0]


def settings(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["settings"]
    return found


def test_a_file_of_the_targets_name_that_is_not_read_is_named(cli: CommandLine):
    (cli.folder / "msas").mkdir()
    (cli.folder / "msas" / "T1.aln").write_text("CLUSTAL\n")
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--msa-dir", cli.folder / "msas")
    assert done.code == 0
    assert "only its sequence is used. Not read: T1.aln; an alignment is A3M (.a3m), Stockholm" in done.err
