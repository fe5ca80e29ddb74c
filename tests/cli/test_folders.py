"""Folders that a command writes are inputs of the others: score, relax and report."""

from __future__ import annotations

import pytest

from tests.helpers.command_line import CommandLine

SEQUENCE = "MKTAYIAKQRQISFVKS"
FOLD = ("--num-recycles", "0", "--no-plots")
COMMANDS = {
    "infer": ("infer", "{fasta}", *FOLD, "--relax", "best"),
    "screen": ("screen", "{fasta}", *FOLD, "--workers", "1"),
    "score": ("score", "{structure}", "--initial-guess", *FOLD),
    "mutate": ("mutate", "{fasta}", "--mutations", "{mutants}", *FOLD),
    "design": ("design", "hallucinate", "--length", "14", "--steps", "2,1,1"),
}


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_folders_are_inputs(cli: CommandLine, command: str) -> None:
    names = {
        "fasta": cli.folder / "in.fasta",
        "mutants": cli.folder / "mutants.txt",
        "structure": cli.folder / "first",
    }
    names["fasta"].write_text(f">t\n{SEQUENCE}\n")
    names["mutants"].write_text("K2R\n")
    if command == "score":
        assert cli.run("infer", names["fasta"], "--out", names["structure"], *FOLD).code == 0
    folder = cli.folder / command
    done = cli.run(*(part.format_map(names) for part in COMMANDS[command]), "--out", folder)
    assert done.code == 0, done.err
    for more in (
        ("score", folder, "--initial-guess", "--out", cli.folder / "scored", *FOLD),
        ("relax", folder, "--out", cli.folder / "relaxed", "--max-iterations", "5", "--threads", "1"),
        ("report", folder),
        ("report", cli.folder / "relaxed"),
        ("score", cli.folder / "relaxed", "--initial-guess", "--out", cli.folder / "scored_again", *FOLD),
    ):
        done = cli.run(*more)
        assert "error" not in done.err
        assert "failed" not in done.out
        assert done.code == 0 or (more[0] == "relax" and done.out.endswith(" relaxed\n")), done.err
    structures = {
        path.name.removesuffix(".cif") for path in folder.glob("*.cif") if "_relaxed" not in path.name
    }
    relaxed = {
        path.name.removesuffix("_relaxed.cif") for path in (cli.folder / "relaxed").glob("*_relaxed.cif")
    }
    assert relaxed == structures
