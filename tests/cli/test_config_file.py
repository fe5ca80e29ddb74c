"""Options in a file are those of the command, and the command's own come first."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fastfold.cli.command import _parser
from fastfold.utils.command_line import help_all
from fastfold.utils.command_line.config_file import config_text, expand_config
from tests.helpers.command_line import CommandLine

COMMAND = (
    *("infer", "x.fasta", "--out", "r", "--weights", "multimer", "a.npz", "--seeds", "0-4", "--templates"),
    *(
        "--num-recycles",
        "3",
        "--no-plots",
        "--max-template-date",
        "2021-01-02",
        "--recycle-tolerance",
        "0.25",
    ),
    *("--relax", "--complex", "--msa-server", "https://example.org", "--api-key-value", "secret"),
)


def test_printed_options_are_read_back(cli: CommandLine) -> None:
    printed = cli.run(*COMMAND, "--print-config")
    assert (printed.code, printed.err) == (0, "")
    assert "secret" not in printed.out
    values = yaml.safe_load(printed.out)
    assert values["weights"] == ["multimer", "a.npz"]
    assert (values["templates"], values["no-plots"], values["relax"]) == (True, True, "best")
    path = cli.folder / "c.yaml"
    path.write_text(printed.out)
    again = cli.run("infer", "--config", path, "--print-config")
    assert (again.code, again.out) == (0, printed.out), again.err
    own = vars(_parser().parse_args(["infer", "--config", str(path), "--api-key-value", "secret"]))
    plain = vars(_parser().parse_args(list(COMMAND)))
    assert own | {"config": None} == plain


def test_options_without_inputs_and_values_with_dashes_are_read_back(cli: CommandLine) -> None:
    command = ["infer", "--out", "o", "--jobname-prefix=-x", "--msa-dir=--quiet", "--relax"]
    path = cli.folder / "options.yaml"
    path.write_text(cli.run(*command, "--print-config").out)
    assert "inputs" not in path.read_text()
    done = cli.run("infer", "--config", path, "--print-config")
    assert (done.code, done.out) == (0, path.read_text()), done.err


def test_the_part_of_a_job_array_is_read_back(cli: CommandLine) -> None:
    command = [
        "screen",
        "x.fasta",
        "--out",
        "o",
        "--time-limit",
        "2h",
        "--memory-limit",
        "4GiB",
        "--shard",
        "2/3",
    ]
    path = cli.folder / "options.yaml"
    path.write_text(cli.run(*command, "--print-config").out)
    assert "shard: 2/3\n" in path.read_text()
    assert cli.run("screen", "--config", path, "--print-config").out == path.read_text()


def test_options_of_the_command_replace_those_of_the_file(cli: CommandLine) -> None:
    path = cli.folder / "c.yaml"
    path.write_text("out: a\nweights: [one, two]\nnum_recycles: 3\ncomplex: false\nquiet:\n")
    command = ["infer", "x.fasta", f"--config={path}", "--weights", "three", "--num-recycle=1"]
    options = _parser().parse_args(command)
    assert (options.out, options.weights, options.num_recycles) == (Path("a"), [Path("three")], 1)
    assert (options.inputs, options.complex, options.quiet) == ([Path("x.fasta")], False, False)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("pae: no", ["--pae", "no"]),
        ("pae: yes", ["--pae", "yes"]),
        ("cuda-graphs: false", ["--no-cuda-graphs"]),
        ("cuda-graphs: on", ["--cuda-graphs"]),
        ("no-cuda-graphs: true", ["--no-cuda-graphs"]),
        ("no_cuda_graphs: off", ["--cuda-graphs"]),
        ("jobname-prefix: 007", ["--jobname-prefix", "007"]),
        ("jobname-prefix: 1e3", ["--jobname-prefix", "1e3"]),
        ("jobname-prefix: on", ["--jobname-prefix", "on"]),
        ("msa-dir: 2024_10", ["--msa-dir", "2024_10"]),
        ("relax: yes", ["--relax"]),
        ("relax: no", []),
        ("templates: true", ["--templates"]),
        ("no-plots: No", []),
        ("quiet: ON", ["--quiet"]),
    ],
)
def test_values_are_those_of_the_command_line(cli: CommandLine, text: str, arguments: list[str]) -> None:
    """YAML reads ``no`` as false and ``007`` as 7, which options do not."""
    path = cli.folder / "c.yaml"
    path.write_text(text)
    command = ["infer", "x.fasta", "--out", "r"]
    of_file = vars(_parser().parse_args([*command, "--config", str(path)]))
    assert of_file | {"config": None} == vars(_parser().parse_args([*command, *arguments]))


@pytest.mark.parametrize("iterations", [("-N2",), ("-N", "2"), ("--iter", "2"), ("--iterations=2",)])
def test_an_option_of_the_command_is_known_in_all_its_forms(
    cli: CommandLine, iterations: tuple[str, ...]
) -> None:
    path = cli.folder / "c.yaml"
    path.write_text("iterations: 5\ne-value: 1e-9\n")
    options = _parser().parse_args(
        ["search", "--config", str(path), "--out", "r", *iterations, "--", "x.fasta"]
    )
    assert (options.iterations, options.e_value, options.inputs) == (2, 1e-9, [Path("x.fasta")])


def test_two_files_are_refused(cli: CommandLine) -> None:
    done = cli.run("infer", "x.fasta", "--config", "a.yaml", "--config=b.yaml")
    assert done.code == 2
    assert "--config is given 2 times; write all options into one file" in done.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num-recycels: 3", "no option 'num-recycels'; did you mean num-recycles?"),
        ("a: [", "c.yaml:1: is not plain YAML"),
        ("- a", "expected lines such as 'num-recycles: 3', found list"),
        ("complex: 3", "complex: expected true or false, found '3'"),
        ("weights: []", "weights: expected a number, a text or a list of them, found []"),
        ("seeds: {a: 1}", "seeds: expected a number, a text or a list of them"),
        ("num-recycles: three", "argument --num-recycles"),
        ("config: other.yaml", "no option 'config'; fastfold infer --help-all lists them"),
        ("seeds: [1, 2]", "c.yaml: seeds: expected one value, found a list"),
        ("seed: 1\nrandom-seed: 2", "c.yaml: 'seed' and 'random-seed' are the same option; remove one"),
        ("num_recycles: 1\nnum-recycles: 2", "'num_recycles' and 'num-recycles' are the same option"),
    ],
)
def test_a_wrong_file_is_wrong_use(cli: CommandLine, text: str, expected: str) -> None:
    path = cli.folder / "c.yaml"
    path.write_text(text)
    done = cli.run("infer", "x.fasta", "--out", "r", "--config", path)
    assert done.code == 2
    assert expected in done.err
    assert done.err.startswith("usage: fastfold infer")
    missing = cli.run("infer", "x.fasta", "--config", cli.folder / "none.yaml")
    assert "none.yaml: no such file; check the name" in missing.err


@pytest.mark.parametrize(
    ("command", "listing"),
    [
        (("infer", "x.fasta"), "fastfold infer --help-all"),
        (("design", "hallucinate"), "fastfold design --help"),
    ],
)
def test_an_unknown_option_names_the_help_of_its_command(
    cli: CommandLine, command: tuple[str, ...], listing: str
) -> None:
    path = cli.folder / "c.yaml"
    path.write_text("zzzqq: 3\n")
    done = cli.run(*command, "--out", "r", "--config", path)
    assert f"no option 'zzzqq'; {listing} lists them" in done.err


def test_arguments_without_a_file_stay() -> None:
    assert expand_config(["a", "--out", "b"], [], help_command="fastfold --help") == ["a", "--out", "b"]
    assert config_text(_parser().parse_args([]), []) == ""


@pytest.mark.parametrize("command", ["infer", "screen", "search"])
def test_rare_options_are_in_the_full_help_alone(cli: CommandLine, command: str) -> None:
    short, full = (cli.run(command, flag) for flag in ("--help", "--help-all"))
    assert (short.code, full.code) == (0, 0)
    assert "--help-all" in short.out
    assert "--api-key-header" in full.out
    assert "--api-key-header" not in short.out
    (commands,) = (
        action for action in _parser()._actions if action.dest == "==SUPPRESS==" and action.choices
    )
    parser = commands.choices[command]  # type: ignore[call-overload,index]
    for action in parser._actions:
        name = max(action.option_strings, key=len, default="")
        assert (name in short.out) == (not help_all.is_rare(action)), name
        assert name in full.out
