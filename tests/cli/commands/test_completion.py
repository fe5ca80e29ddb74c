"""Tab completion: the script that is printed completes commands and options in a real shell."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

import pytest

from fastfold.cli.commands.completion import run_completion
from fastfold.errors import ConfigError
from tests.helpers.command_line import CommandLine


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(cli: CommandLine):
    pytest.importorskip("shtab")
    script = cli.folder / "complete.sh"
    script.write_text(cli.run("completion", "bash").out)

    def complete(*words: str) -> set[str]:
        line = (
            f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_fastfold"
        )
        shell = subprocess.run(
            ["bash", "-c", line + '; echo "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True
        )
        return set(shell.stdout.split())

    assert complete("fastfold", "scr") == {"screen"}
    assert {"--msa-dir", "--msa-server"} <= complete("fastfold", "infer", "--msa-")


def test_without_shtab_the_package_is_named(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    done = cli.run("completion", "zsh")
    assert done.code == 2
    assert "pip install shtab" in done.err
    with pytest.raises(ConfigError, match="pip install shtab"):
        run_completion(argparse.ArgumentParser(), "zsh")
