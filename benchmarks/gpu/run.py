"""First hour on a GPU: every check that needs one, in one command.

Usage: python benchmarks/gpu/run.py [--device cuda|cpu] [--steps NAME ...] [--out FOLDER]

Each step is a separate process with a time limit; a step that fails does not stop the others. Writes one JSON and one
Markdown file named after the GPU. Without a GPU the program runs the steps that a CPU can, and marks the rest as not
run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.gpu.steps import REPOSITORY, Step, all_steps

_TAIL = 4000
"""Number of characters of a step's output that are kept."""


@dataclass(frozen=True)
class Outcome:
    """Result of one step.

    Attributes:
        name: Name of the step.
        state: ``passed``, ``failed``, ``timed out`` or ``not run``.
        seconds: Duration.
        output: Reason why it did not run, or the end of its output.
    """

    name: str
    state: str
    seconds: float
    output: str


def run_step(step: Step) -> Outcome:
    """Run a step in its own process group, which ends with its time limit."""
    if missing := step.missing():
        return Outcome(step.name, "not run", 0.0, missing)
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **step.environment}
    process = subprocess.Popen(
        step.arguments,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=60 * step.minutes)
        state = "passed" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        state = "timed out"
    return Outcome(step.name, state, round(time.monotonic() - start, 1), output[-_TAIL:])


def markdown(machine: str, outcomes: Sequence[Outcome]) -> str:
    """Return the report: a table of all steps, and the output of those that did not pass."""
    lines = [f"# First hour on {machine}", "", "| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {o.name} | {o.state} | {o.seconds:.0f} |" for o in outcomes]
    for outcome in outcomes:
        if outcome.state != "passed":
            lines += ["", f"## {outcome.name}: {outcome.state}", "", "```", outcome.output.strip(), "```"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and write the report; return 1 if a step failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="run only these steps")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "gpu_results", help="folder of the report")
    options = parser.parse_args(arguments)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, a trial"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("gpu_" + re.sub(r"[^a-z0-9]+", "_", machine.lower()).strip("_"))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        steps = all_steps(options.device, Path(scratch))
        if unknown := set(options.steps or ()) - {step.name for step in steps}:
            parser.error(f"no step {sorted(unknown)[0]!r}; expected one of {[step.name for step in steps]}")
        for step in steps:
            if options.steps and step.name not in options.steps:
                continue
            outcomes.append(run_step(step))
            last = outcomes[-1]
            print(f"{last.name}: {last.state} ({last.seconds:.0f} s)", flush=True)
            # Written after every step, so that results survive the loss of the machine.
            record = {"machine": machine, "torch": torch.__version__, "steps": [asdict(o) for o in outcomes]}
            path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
            path.with_suffix(".md").write_text(markdown(machine, outcomes))
    print(f"written to {path}.md and {path}.json")
    return int(any(o.state in ("failed", "timed out") for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
