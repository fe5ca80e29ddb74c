"""An option of another program, or a misspelt one, is answered with what to write."""

from __future__ import annotations

import pytest

from fastfold.cli.command import _parser
from fastfold.cli.hints import OTHER_PROGRAMS, option_hints
from tests.helpers.command_line import CommandLine


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["infer", "a.fasta", "--out", "x", "--amber"], "--amber: use --relax best"),
        (["infer", "a.fasta", "--out", "x", "--host-url=http://h"], "--host-url: use --msa-server URL"),
        (["infer", "a.fasta", "--out", "x", "--data", "/d"], "--data: use --weights"),
        (["infer", "a.fasta", "--out", "x", "--max-seq", "128"], "--max-seq: use --max-msa CLUSTERS:EXTRA"),
        (["infer", "a.fasta", "--out", "x", "--calc-extra-ptm"], "--calc-extra-ptm: leave it out: scores of"),
        (["infer", "--fasta_paths=a.fasta", "--output_dir=x"], "--output_dir: use --out DIR"),
        (["infer", "a.fasta", "--out", "x", "--num-recycels", "3"], "did you mean --num-recycles?"),
        (["infer", "a.fasta", "--out", "x", "--num_recycles", "3"], "did you mean --num-recycles?"),
        (["infer", "a.fasta", "results"], "--out: the folder for the results"),
        (
            ["infer", "--out", "x", "--relax", "a.fasta"],
            "--relax: put the inputs first, or write --relax best",
        ),
        (["infer", "a.fasta", "--out", "x", "--db_preset=full_dbs"], "--db_preset: use --databases DIR"),
        (["relax", "a.pdb", "--out", "x", "--platfrom", "CPU"], "--platfrom: did you mean --platform?"),
    ],
)
def test_wrong_options_are_answered_with_the_right_ones(
    cli: CommandLine, arguments: list[str], hint: str
) -> None:
    done = cli.run(*arguments)
    assert done.code == 2
    assert hint in done.err
    assert done.err.startswith(f"usage: fastfold {arguments[0]}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("infer a.fasta --out x --max-msa 0:1", "--max-msa must be from 1 to 100000, found 0"),
        ("infer a.fasta --out x --max-msa 5", "--max-msa: '5': write CLUSTERS:EXTRA"),
        ("infer a.fasta --out x --sample depth --sample-depths 0", "--sample-depths: a depth must be from 1"),
        ("infer a.fasta --out x --stop-at-score 101", "--stop-at-score: '101' is not a number from 0 to 100"),
        ("search a.fasta --out x --db d.fasta --F2 2", "--F2 must be more than 0 and at most 1, found 2"),
        (
            "design hallucinate --length 20 --out x --charge 1 0",
            "--charge: expected a smallest and a largest",
        ),
        ("design hallucinate --length 20 --out x --con num=0", "--con: num: expected a whole number from 1"),
        ("design hallucinate --length 20 --out x --learning-rate 0", "--learning-rate: expected a positive"),
        ("submit a.fasta --priority 11", "--priority: '11' is not a whole number from -10 to 10"),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_its_option(
    cli: CommandLine, arguments: str, message: str
) -> None:
    done = cli.run(*arguments.split())
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("inferr", "unknown command 'inferr'; did you mean infer?"),
        ("fold", "unknown command 'fold'; did you mean infer?"),
        ("zzzz", "unknown command 'zzzz'; the commands are infer, ensemble,"),
    ],
)
def test_the_nearest_command_is_named(cli: CommandLine, command: str, message: str) -> None:
    done = cli.run(command, "a.fasta")
    assert done.code == 2
    assert message in done.err


def test_infer_and_design_count_seeds_by_one_name(cli: CommandLine) -> None:
    (commands,) = (
        action for action in _parser()._actions if action.dest == "==SUPPRESS==" and action.choices
    )
    for command in ("infer", "design"):
        assert "--num-seeds" in commands.choices[command]._option_string_actions  # type: ignore[call-overload,index]
    done = cli.run("infer", "a.fasta", "--out", "x", "--num-seeds", "0")
    assert "argument --num-seeds: '0' is not a whole number from 1" in done.err


def test_what_the_hints_name_exists() -> None:
    (commands,) = (
        action for action in _parser()._actions if action.dest == "==SUPPRESS==" and action.choices
    )
    known = set(commands.choices["infer"]._option_string_actions)  # type: ignore[call-overload,index]
    for option, hint in OTHER_PROGRAMS.items():
        assert option not in known
        named = {word.strip(",;") for word in hint.split() if word.startswith("--")}
        assert named <= known, option


def test_options_that_are_known_or_like_nothing_get_no_hint() -> None:
    assert option_hints(["--out", "x", "--ou", "--zzz", "a.fasta"], ["--out", "--seed"]) == []
