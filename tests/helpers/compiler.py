"""Process without Triton's interpreter, in which tests compile kernels.

It starts at the first call and serves all tests of a session, because each new one would import PyTorch first.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from typing import Any

from tests.conftest import REPOSITORY

_SERVE = """
import contextlib, io, json, sys, traceback

for line in sys.stdin:
    program, arguments = json.loads(line)
    printed, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            exec(program, {"arguments": arguments})
    except Exception:
        error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), flush=True)
"""


@functools.cache
def _process() -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # which closes its input, so it ends
    return process


def run_program(program: str, *arguments: Any) -> list[Any]:
    """Run Python source that finds ``arguments`` and prints lines of JSON; return what it printed."""
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([program, arguments]), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, f"the process ended with code {process.wait()}"
    printed, error = json.loads(answer)
    assert error is None, error
    return [json.loads(line) for line in printed.splitlines()]
