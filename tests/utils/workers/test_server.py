"""Workers that a server forks: what it has imported is there, and their ends are told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastfold.inference.config import InferConfig
from fastfold.inference.folding.background import start_ahead
from fastfold.utils.workers.server import start_server, worker_context
from tests.conftest import REPOSITORY

SETTINGS = "fastfold.utils.workers.server_settings"
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the server")


def python(code: str, *arguments: str) -> str:
    """What some code prints in a fresh interpreter, whose main process has no server of the tests."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


@linux
def test_forked_workers_survive_their_server_and_a_killed_one_loses_no_call(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from fastfold.errors import FastFoldError
from fastfold.inference.folding.background import Background, BackgroundWork
from fastfold.utils.workers.server import start_server
from tests.inference.folding.functions import die_once, fail, server_of

start_server(["tests.inference.folding.functions", "a_module_that_is_missing"])
background = Background()
call = lambda function, *arguments: background.submit(BackgroundWork(function, arguments, {})).result()
server, threads, imported = call(server_of, sys.argv[2:])
print(server != os.getpid(), threads, imported, call(die_once, Path(sys.argv[1])))
worker = call(os.getpid)
os.kill(server, signal.SIGKILL)
print(call(os.getpid) == worker)
try:
    call(fail, "exit")
except FastFoldError as error:
    print(error)
print(call(os.getpid) != worker, call(server_of)[0] not in (server, os.getpid()))
background.close()
"""
    found = python(code, str(tmp_path / "mark"), SETTINGS, "torch").splitlines()
    assert found[:2] == ["True 1 [True, False] done", "True"]
    assert found[2].startswith("the process that draws and relaxes ended: exit code")
    assert found[3:] == ["True True"]


def test_workers_are_spawned_where_a_fork_is_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems, and programs that have imported PyTorch and may need a server of their own."""
    assert "torch" in sys.modules
    start_ahead(InferConfig())
    assert worker_context().get_start_method() == "spawn"
    monkeypatch.setattr(sys, "platform", "darwin")
    start_server([])
    assert worker_context().get_start_method() == "spawn"


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import os
from fastfold.inference.folding.background import Background, BackgroundWork

background = Background()
print(background.submit(BackgroundWork(os.getpid, (), {})).result() != os.getpid(), __file__)
background.close()
"""
    )
    command = [sys.executable, str(script)]
    found = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=True, capture_output=True
    )
    assert found.stdout.decode().splitlines() == [f"True {script}"]


@linux
@pytest.mark.slow
def test_the_server_of_a_fold_has_one_thread_and_its_modules() -> None:
    """A fork copies one thread, so locks that other threads hold would never be released."""
    code = """
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.background import VIEWER, Background, BackgroundWork, start_ahead
from tests.inference.folding.functions import server_of

start_ahead(InferConfig(relax="best"))
background = Background()
modules = ["torch", "matplotlib.figure", "fastfold.inference.relax.files", *VIEWER, "openmm"]
call = BackgroundWork(server_of, (modules,), {})
print(*background.submit(call).result()[1:])
background.close()
"""
    assert python(code) == "1 [True, True, True, True, False]"
