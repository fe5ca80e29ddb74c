"""The command line itself: help that teaches, wrong use, exit codes, and the smaller commands."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass

import numpy as np
import pytest

import fastfold
from fastfold import cli as module
from fastfold.cli.command import _parser
from fastfold.inference import runner
from fastfold.kernels.cpu.products import multiplies_bfloat16
from fastfold.utils.option_fields import options_of
from tests.conftest import REPOSITORY
from tests.helpers.command_line import ORACLES, QUICK, CommandLine
from tests.helpers.forked import fork_command
from tests.helpers.kernel_checks import without_bfloat16_units

SEQUENCE = "MKTAYIAKQR"


def test_without_arguments_the_help_is_shown(cli: CommandLine):
    done = cli.run()
    assert done.code == 2
    for command in ("infer", "verify", "weights"):
        assert command in done.out
    assert "fastfold infer protein.fasta --out results --weights monomer_ptm" in done.out


def test_the_help_of_infer_teaches(cli: CommandLine):
    """A person who reads nothing else knows the command, the files, alignments, weights and exit codes."""
    done = cli.run("infer", "--help")
    assert done.code == 0
    text = " ".join(done.out.split())
    assert text.startswith("usage: fastfold infer INPUT [INPUT ...] --out DIR [--weights FILE ...]")
    for option in (
        "msa-dir",
        "complex",
        "num-recycles",
        "seed",
        "precision",
        "device",
        "no-plots",
        "reference",
    ):
        assert f"--{option}" in text
    for explained in (
        "joined by ':' in one record are a complex",
        "pLDDT (0-100) is in the B-factor column",
        "_pae.json predicted aligned error",
        "run the same command again to continue",
        "far better with an alignment",
        "<id>.a3m, <id>.a3m.gz, <id>.sto",
        "params_model_1.npz",
        "exit code: 0 all targets folded",
        "130 stopped by Ctrl-C",
    ):
        assert explained in text
    assert max(map(len, done.out.splitlines())) <= 120


@pytest.mark.parametrize(
    "command", [["verify"], ["environment"], ["weights"], ["weights", "info"], ["weights", "convert"]]
)
def test_every_command_has_help(cli: CommandLine, command: list[str]):
    done = cli.run(*command, "--help")
    assert done.code == 0
    assert done.out.startswith("usage: fastfold")


def test_a_command_has_the_same_parser_alone_and_among_all():
    def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
        (found,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
        return found

    every = commands(_parser())
    for name in every.keys() - {"completion"}:
        (alone,) = commands(_parser(name)).items()
        assert (alone[0], alone[1].format_help()) == (name, every[name].format_help())
    assert commands(_parser("completion")).keys() == commands(_parser("unknown")).keys() == every.keys()


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Names of a parser's options and arguments, with those of its commands."""
    commands = [
        one
        for action in parser._actions
        if isinstance(action.choices, dict)
        for one in action.choices.values()
    ]
    own = {name for action in parser._actions for name in (*action.option_strings, action.dest)}
    return own.union(*map(_options, commands))


def test_a_command_has_each_option_of_a_setting():
    """An option in a group that no command lists would be nowhere."""
    known = _options(_parser())
    for path in (REPOSITORY / "fastfold").rglob("*.py"):
        if "utils.option_fields import" in path.read_text("utf-8"):
            name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
            for kind in filter(is_dataclass, vars(importlib.import_module(name)).values()):
                for field, choice in options_of(kind):
                    assert known >= set(choice.names), f"no command has {kind.__name__}.{field.name}"


def test_version(cli: CommandLine):
    assert cli.run("--version").out == f"fastfold {fastfold.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fold", "a.fasta"], "unknown command 'fold'; did you mean infer?"),
        (["infer", "a.fasta"], "required: --out"),
        (["infer", "a.fasta", "--out", "x", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["infer", "a.fasta", "--out", "x", "--seed", "-1"], "argument --seed"),
        (["infer", "a.fasta", "--out", "x", "--seed=-1"], "'-1' is not a whole number from 0 to 2147483647"),
        (["infer", "a.fasta", "--out", "x", "--seed", "1.5"], "'1.5' is not a whole number"),
        (["infer", "a.fasta", "--out", "x", "--seed", "9" * 5000], "is not a whole number"),
        (["infer", "a.fasta", "--out", "x", "--num-recycles=-1"], "'-1' is not a whole number"),
        (["infer", "a.fasta", "--out", "x", "--num-recycles", "three"], "'three' is not a whole number"),
        (["infer", "a.fasta", "--out", "x", "--precision", "fp8"], "invalid choice: 'fp8'"),
        (["infer", "a.fasta", "--out", "x", "--device", "tpu"], "'tpu' is not a device"),
        (["weights"], "required: ACTION"),
        (["weights", "info"], "required: FILE"),
    ],
)
def test_wrong_use_says_what_is_wrong_with_exit_code_2(cli: CommandLine, arguments, message):
    done = cli.run(*arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.startswith("usage: fastfold")
    assert done.out == ""


def test_fasta_files_behind_weights_are_noticed(cli: CommandLine):
    """--weights takes all names that follow, which would otherwise end in a puzzling message."""
    fasta, weights = cli.fasta({"T1": SEQUENCE}), cli.weights()
    done = cli.run("infer", "--out", cli.out, "--weights", weights, fasta)
    assert done.code == 2
    assert f"{fasta}: every name after --weights is a weights file; put FASTA files first" in done.err
    done = cli.run("infer", "--out", cli.out, "--weights", weights)
    assert (done.code, "no input given" in done.err) == (2, True)


def test_several_weights_may_follow_one_flag(cli: CommandLine):
    fasta, weights = cli.fasta({"T1": SEQUENCE}), [cli.weights(), cli.weights("model_2_ptm", noise=0.1)]
    done = cli.run("infer", fasta, "--out", cli.out, *QUICK, "--weights", *weights)
    assert done.code == 0
    assert "by model_1_ptm, model_2_ptm" in done.err


def test_an_error_outside_of_all_targets_is_one_message(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    def broken(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(runner, "run", broken)
    fasta = cli.fasta({"T1": SEQUENCE})
    done = cli.infer(fasta)
    assert done.code == 1
    assert done.err.splitlines()[1:] == [
        "fastfold: internal error, ZeroDivisionError: division by zero. This is a bug in FastFold; "
        "FASTFOLD_DEBUG=1 shows where, please report it"
    ]
    monkeypatch.setenv("FASTFOLD_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.infer(fasta)
    monkeypatch.setenv("FASTFOLD_DEBUG", "0")
    assert cli.infer(fasta).code == 1


def test_ctrl_c_outside_of_folding_is_130(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    done = cli.infer(cli.fasta({"T1": SEQUENCE}))
    assert (done.code, "Traceback" in done.err) == (130, False)


class TestClosedPipes:
    """``| head -1`` and its like: no traceback, and results are not lost."""

    def test_of_a_command_that_prints(self, cli: CommandLine, ended):
        reader, writer = os.pipe()
        os.close(reader)
        process = cli.start("cite", stdout=writer)
        os.close(writer)
        ended.append(process)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (1, "")

    @pytest.mark.long
    def test_of_infer(self, cli: CommandLine, ended):
        process = fork_command(
            "infer", cli.fasta({"T1": SEQUENCE}), "--out", cli.out, "--weights", cli.weights(), *QUICK
        )
        ended.append(process)
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in err
        assert "BrokenPipe" not in err
        assert "T1_rank_001_model_1_ptm_seed_0_scores.json" in cli.names()

    @pytest.mark.slow
    def test_of_infer_with_its_progress(self, cli: CommandLine, ended):
        process = cli.start(
            *("infer", cli.fasta({"T1": SEQUENCE}), "--out", cli.out, "--weights", cli.weights(), *QUICK),
            stderr=subprocess.STDOUT,
        )
        ended.append(process)
        process.stdout.close()
        process.stdout = None
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert "T1_rank_001_model_1_ptm_seed_0_scores.json" in cli.names()


class TestWeights:
    """``fastfold weights``."""

    def test_info_says_what_a_file_is(self, cli: CommandLine):
        done = cli.run("weights", "info", cli.official_weights("model_1_multimer_v3"))
        assert done.code == 0
        assert re.search(r"format +official AlphaFold parameters", done.out)
        assert re.search(r"network +multimer", done.out)

    def test_converted_weights_give_the_same_structures(self, cli: CommandLine):
        official = cli.official_weights()
        own = cli.folder / "own" / "params_model_1_ptm.safetensors"
        own.parent.mkdir()
        done = cli.run("weights", "convert", official, own)
        assert done.code == 0
        assert re.fullmatch(rf"wrote {re.escape(str(own))}: [\d,]+ parameters from .*\n", done.out)
        fasta = cli.fasta({"T1": SEQUENCE})
        cli.infer(fasta, weights=[official])
        expected = cli.contents()
        shutil.rmtree(cli.out)
        cli.infer(fasta, weights=[own])
        found = cli.contents()
        assert found.keys() == expected.keys()
        same = {name for name in found if found[name] == expected[name]}
        assert same == {name for name in found if not name.endswith("_config.json")}

    @pytest.mark.parametrize("action", [["info"], ["convert"]])
    def test_a_bad_file_is_one_message(self, cli: CommandLine, action: list[str]):
        more = [cli.folder / "out.npz"] if action == ["convert"] else []
        done = cli.run("weights", *action, cli.folder / "none.npz", *more)
        assert done.code == 1
        assert (
            done.err == f"fastfold: {cli.folder / 'none.npz'}: no such file; check the path of the weights\n"
        )


class TestVerify:
    """``fastfold verify``."""

    def test_the_recorded_official_run_passes_line_by_line(self, cli: CommandLine):
        done = cli.run("verify", ORACLES / "synthetic_monomer", "--device", "cpu")
        assert done.code == 0
        lines = [line for line in done.out.splitlines() if line.endswith("pass")]
        assert len(lines) > 20
        assert re.search(r"^structure_module/final_atom_positions +\S+ +\S+ pass$", done.out, re.MULTILINE)
        assert (
            done.out.splitlines()[-1]
            == f"{len(lines)} of {len(lines)} outputs agree with the official program"
        )

    def test_one_wrong_output_fails_with_exit_code_1(self, cli: CommandLine):
        folder = cli.folder / "oracle"
        shutil.copytree(ORACLES / "synthetic_monomer", folder)
        with np.load(folder / "outputs.npz") as archive:
            outputs = {name: archive[name] for name in archive.files}
        outputs["representations/pair"] = outputs["representations/pair"] * 1.001
        np.savez(folder / "outputs.npz", **outputs)
        done = cli.run("verify", folder, "--device", "cpu")
        assert done.code == 1
        failed = [line for line in done.out.splitlines() if line.endswith("FAIL")]
        assert [line.split()[0] for line in failed] == ["representations/pair"]

    def test_a_case_without_inputs_is_skipped_and_the_others_are_compared(self, cli: CommandLine):
        for name in ("a", "b"):
            shutil.copytree(ORACLES / "synthetic_monomer", cli.folder / "runs" / name)
        (cli.folder / "runs" / "a" / "features.npz").unlink()
        done = cli.run("verify", cli.folder / "runs", "--device", "cpu")
        assert done.code == 0, done.err
        missing = cli.folder / "runs" / "a" / "features.npz"
        assert f"skipped: {missing}: no such file" in done.out.splitlines()
        assert done.out.splitlines()[-1].endswith(
            "outputs agree with the official program; 1 of 2 cases skipped for lack of inputs"
        )
        assert re.search(r"^structure_module/final_atom_positions .* pass$", done.out, re.MULTILINE)
        (cli.folder / "runs" / "b" / "features.npz").unlink()
        assert cli.run("verify", cli.folder / "runs", "--device", "cpu").code == 1

    def test_a_damaged_case_fails_and_the_others_are_compared(self, cli: CommandLine):
        for name in ("a", "b"):
            shutil.copytree(ORACLES / "synthetic_monomer", cli.folder / "runs" / name)
        damaged = cli.folder / "runs" / "a" / "features.npz"
        damaged.write_bytes(b"PK")
        done = cli.run("verify", cli.folder / "runs", "--device", "cpu")
        assert done.code == 1
        assert f"FAIL: {damaged}: not a readable array file" in done.out
        assert re.search(r"^structure_module/final_atom_positions .* pass$", done.out, re.MULTILINE)

    @pytest.mark.parametrize("processor", [nullcontext, without_bfloat16_units], ids=["units", "plain"])
    def test_outputs_of_less_than_float32_have_a_wider_tolerance(
        self, cli: CommandLine, processor: Callable[[], AbstractContextManager[None]]
    ):
        """Without units, folds in this precision are in float32."""
        options = ("--device", "cpu", "--precision", "bf16-products")
        with processor():
            is_reduced = multiplies_bfloat16()
            done = cli.run("verify", ORACLES / "synthetic_monomer", *options)
        assert done.code == 0, done.out
        assert "violations" not in done.out
        assert done.out.startswith("warning: precision bf16-products is float32 here") != is_reduced
        pair = re.search(r"^representations/pair +(\S+) ", done.out, re.MULTILINE)
        assert pair is not None
        assert (1e-3 < float(pair[1]) < 0.03) if is_reduced else float(pair[1]) < 1e-5

    def test_a_folder_that_is_no_oracle_is_one_message(self, cli: CommandLine):
        done = cli.run("verify", cli.folder)
        assert done.code == 1
        assert done.err.startswith(f"fastfold: {cli.folder / 'config.json'}: ")
        assert "Traceback" not in done.err


def test_the_module_and_the_installed_command_are_the_same():
    for command in ([sys.executable, "-m", "fastfold"], [sys.executable, "-m", "fastfold.cli"]):
        found = subprocess.run(
            [*command, "--version"], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        assert found.stdout == f"fastfold {fastfold.__version__}\n"
    scripts = re.search(
        r"\[project.scripts\]\nfastfold = \"(.*):(.*)\"", (REPOSITORY / "pyproject.toml").read_text()
    )
    assert scripts is not None
    assert (scripts[1], scripts[2]) == (module.__name__, module.console.__name__)
