"""Whole folds, training steps and the longest protein on one GPU, in one command of at most nine minutes.

Usage: python benchmarks/gpu/whole_folds.py [--device cuda|mps|cpu] [--toy] [--parts NAME ...] [--out FOLDER]

Parts run one after another in processes of their own, the most important first. A part that takes one and a half times
its slot is killed. Each number is a line of JSON, written as it comes, with the device's name. Networks have official
sizes and random parameters, so no weights are needed, and nothing is installed: packages that the machine lacks are
found in ``.gpu/site``, which ``benchmarks/gpu/pack.py`` fills. ``--toy`` runs every part with small sizes on a CPU, and
kills only a part that hangs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.gpu.attention_rows import attention  # noqa: E402
from benchmarks.gpu.compiling import kernels  # noqa: E402
from benchmarks.gpu.deepmind import alphafold  # noqa: E402
from benchmarks.gpu.outer_products import outer_products  # noqa: E402
from benchmarks.gpu.rivals import generic, gluon, offload, openfold, triangles  # noqa: E402
from benchmarks.gpu.timing import (  # noqa: E402
    PASSES,
    SITE,
    TOY,
    Line,
    Sizes,
    Stopwatch,
    network_of,
    random_target,
    release_memory,
    reported,
)

sys.path.append(str(SITE))

LIMIT = 1.5
"""A part is killed after this many times its slot."""
TOY_SECONDS = 600.0
"""Slot of every part with small sizes: only what hangs exceeds it, however busy the machine is."""
MIN_SECONDS = 5.0
"""A part with less time is skipped."""
POLL_SECONDS = 0.1
"""Time between two looks at a part's output."""
TOTAL_SECONDS = 540
LONG = 1024
"""Residues above which a target is folded once, without CUDA graphs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=[one.name for one in PARTS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_results")))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        return run_here(options.part, options.device, TOY if options.toy else Sizes())
    options.out.mkdir(parents=True, exist_ok=True)
    end, failed = math.inf if options.toy else time.monotonic() + TOTAL_SECONDS, False
    with (options.out / "whole_folds.jsonl").open("a", encoding="utf-8") as file:
        for part in PARTS:
            if options.parts and part.name not in options.parts:
                continue
            if options.toy:
                part = replace(part, seconds=TOY_SECONDS)
            for line in run_apart(part, options.device, toy=options.toy, seconds=end - time.monotonic()):
                failed |= "error" in line
                text = json.dumps({"part": part.name} | line)
                print(text, flush=True)
                file.write(text + "\n")
                file.flush()
    return int(failed)


def run_apart(part: Part, device: str, *, toy: bool, seconds: float) -> Iterator[Line]:
    """Yield the lines of a part in a process of its own, which ends with its limit or the given seconds.

    The last line has the part's time, and an ``error`` if the part failed. Text that is not a line of JSON is ignored.
    """
    limit = min(LIMIT * part.seconds, seconds)
    if limit < MIN_SECONDS:
        yield {"skipped": "no time is left"}
        return
    command = [sys.executable, __file__, "--part", part.name, "--device", device, *(["--toy"] if toy else [])]
    start = time.monotonic()
    # Files, because a pipe ends only when every process that a part has started is gone.
    with tempfile.TemporaryDirectory() as folder:
        output, errors = (Path(folder) / name for name in ("output", "errors"))
        with output.open("wb") as first, errors.open("wb") as second:
            process = subprocess.Popen(command, stdout=first, stderr=second, start_new_session=True)
        is_late = False
        try:
            with output.open(encoding="utf-8", errors="replace") as file:
                rest = ""
                while True:
                    has_ended = process.poll() is not None
                    is_late = not has_ended and time.monotonic() - start > limit
                    *texts, rest = (rest + file.read()).split("\n")
                    yield from filter(None, map(_parsed, texts))
                    if has_ended or is_late:
                        break
                    time.sleep(POLL_SECONDS)
        finally:
            _kill(process)
        line: Line = {"wall_s": round(time.monotonic() - start, 1)}
        if is_late:
            line["error"] = f"killed after {limit:.0f} s"
        elif process.returncode:
            end = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            line["error"] = " | ".join([_reason(process.returncode), *end])[-600:]
        yield line


def _parsed(text: str) -> Line | None:
    """Return the object of a line of JSON, or None for other text."""
    try:
        line = json.loads(text) if text.startswith("{") else None
    except ValueError:
        return None
    return line


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started, which would use the device during later parts."""
    with suppress(ProcessLookupError, PermissionError):  # on macOS the latter, of processes that have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def run_here(name: str, device: str, sizes: Sizes) -> int:
    """Print the lines of a part, computed in this process."""
    from fastfold.cli.process import prepare_environment

    prepare_environment()  # must precede the import of PyTorch
    import torch

    part = next(one for one in PARTS if one.name == name)
    torch.manual_seed(0)
    machine = torch.cuda.get_device_name() if device == "cuda" else device
    for line in part.run(device, sizes):
        print(json.dumps({"machine": machine, "torch": torch.__version__} | line), flush=True)
    return 0


def ceilings(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield the rate of matrix products in bf16 and float32, and that of copies."""
    import torch

    side = 8192 if device != "cpu" else 256
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(side, side, device=device, dtype=dtype)
        watch = Stopwatch(device)
        for _ in range(2):  # the first loads libraries
            with watch.measuring():
                for _ in range(10):
                    x @ x
        yield {"product": str(dtype)[6:], "tflops": round(20 * side**3 / watch.device_ms / 1e9, 2)}
    x = torch.empty((1 << 30) if device != "cpu" else (1 << 22), dtype=torch.uint8, device=device)
    y, watch = torch.empty_like(x), Stopwatch(device)
    for _ in range(2):
        with watch.measuring():
            for _ in range(10):
                y.copy_(x)
    yield {"copied_gb_per_s": round(20 * x.numel() / watch.device_ms / 1e6, 1)}


def timed_folds(network: Any, residues: int, device: str, sizes: Sizes, *, graphs: bool) -> Iterator[Line]:
    """Fold a target with two seeds, a long one with one; yield the times of each run of the network.

    The first run compiles kernels and records a CUDA graph, which the second replays from its first pass on.
    """
    import torch

    import fastfold
    from fastfold.inference.folding import predictor

    sequence, msa = random_target(residues, sizes.rows)
    plain, whole = predictor.run_network, Stopwatch(device)
    runs: list[Line] = []
    release_memory(device)

    def timed(*arguments: Any, **options: Any) -> Any:
        watch = Stopwatch(device)
        with watch.measuring():
            result = plain(*arguments, **options)
        runs.append(watch.line())
        return result

    predictor.run_network = timed  # type: ignore[assignment]
    try:
        with whole.measuring():
            fastfold.predict_many(
                [sequence],
                network,
                seeds=range(1 if residues > LONG else 2),
                msas={"query_1": msa},
                num_recycles=PASSES - 1,
                recycle_tolerance=0.0,
                pae=False,
                cuda_graphs=graphs,
            )
    finally:
        predictor.run_network = plain
    line: Line = {"rows": sizes.rows, "passes": PASSES}
    if device == "cuda":
        line["peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    for number, run in enumerate(runs):
        yield line | {"run": number, "mean_fold_s": round(whole.wall_ms / 1e3 / len(runs), 3)} | run


def folds(device: str, sizes: Sizes, network: str, precision: str, lengths: Sequence[int]) -> Iterator[Line]:
    """Yield folds of a network in a precision, with and without CUDA graphs."""
    model = network_of(network, device, precision, sizes)
    for residues in lengths:
        for graphs in (False, True) if device == "cuda" and residues <= LONG else (False,):
            line = {"precision": precision, "network": network, "residues": residues, "graphs": graphs}
            yield from reported(line, timed_folds(model, residues, device, sizes, graphs=graphs))


def monomers(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield folds of ``model_1_ptm`` in bf16."""
    return folds(device, sizes, "model_1_ptm", "bf16", sizes.lengths)


def multimers(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield folds of ``model_1_multimer_v3`` in bf16."""
    return folds(device, sizes, "model_1_multimer_v3", "bf16", sizes.lengths)


def five_networks(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield folds of a short target by five networks of one structure, without a CUDA graph and with one for all."""
    import fastfold

    models = [network_of("model_1_ptm", device, "bf16", sizes) for _ in range(5)]
    sequence, msa = random_target(sizes.lengths[0], sizes.rows)

    def timed(graphs: bool) -> Iterator[Line]:
        for call in ("first", "second"):
            watch = Stopwatch(device)
            with watch.measuring():
                fastfold.predict_many(
                    [sequence],
                    models,
                    msas={"query_1": msa},
                    num_recycles=PASSES - 1,
                    recycle_tolerance=0.0,
                    cuda_graphs=graphs,
                )
            yield {"call": call} | watch.line()

    for graphs in (False, True) if device == "cuda" else (False,):
        line = {"networks": len(models), "residues": len(sequence), "passes": PASSES, "graphs": graphs}
        yield from reported(line, timed(graphs))


def float32(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield folds of ``model_1_ptm`` in float32."""
    return folds(device, sizes, "model_1_ptm", "fp32", sizes.float32_lengths)


def training(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield forward and backward passes of ``model_1_ptm`` at the crops of its training, in bf16.

    Blocks keep their activations, or compute them again.
    """
    import torch

    from benchmarks.long_sequence import features
    from fastfold.evoformer.execution import ExecutionPolicy, set_policy

    model = network_of("model_1_ptm", device, "bf16", sizes).train()

    def steps(*crop: int) -> Iterator[Line]:
        model.zero_grad(set_to_none=True)
        batch = {name: value.to(device)[None] for name, value in features(*crop).items()}
        watch = Stopwatch(device)
        for step in ("first", "second"):
            try:
                with watch.measuring():
                    result = model(batch, 0)
                    loss = result["representations"]["pair"].float().square().mean()
                    (loss + result["structure_module"]["final_atom_positions"].square().mean()).backward()
                    model.zero_grad(set_to_none=True)
            except torch.OutOfMemoryError:
                yield {"step": step, "out_of_memory": True}
                break
            line: Line = {"step": step} | watch.line()
            if device == "cuda":
                line["peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
            yield line

    for (residues, rows, extra), recompute in itertools.product(sizes.crops, (True, False)):
        set_policy(model, ExecutionPolicy(recompute=recompute))
        release_memory(device)
        line = {"crop": residues, "rows": rows, "extra_rows": extra, "recompute": recompute}
        yield from reported(line, steps(residues, rows, extra))


def longest(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield a pass of a network with two blocks at long lengths by a plan, with its peak and the planned one."""
    import torch

    from benchmarks.long_sequence import config_of, features
    from fastfold.evoformer.model import AlphaFold
    from fastfold.evoformer.precision import set_precision
    from fastfold.inference.folding.network import NetworkPasses, run_network
    from fastfold.inference.planning.planner import Planner, parameter_bytes
    from fastfold.memory import HostBuffers, parse_bytes

    config = config_of(2)
    model = set_precision(AlphaFold(config), "bf16").to(device).eval()
    model.name = "two_blocks"
    planner = Planner(
        config,
        2,
        torch.device(device).type,
        host_memory=0,
        parameters=parameter_bytes(model),
        host=HostBuffers(),
        rows=sizes.rows,
        templates=None,
    )

    def timed(residues: int) -> Iterator[Line]:
        plan = planner.plan(residues, parse_bytes(sizes.budget))
        batch = {name: value.to(device) for name, value in features(residues, sizes.rows, 8).items()}
        watch = Stopwatch(device)
        release_memory(device)
        with torch.inference_mode(), watch.measuring():
            run_network(model, lambda cycle, member: batch, NetworkPasses(0, pae=False), None, plan=plan)
        line: Line = {"planned_gib": round(plan.peak / 2**30, 2)} | watch.line()
        if device == "cuda":
            line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        yield line

    for residues in sizes.long_lengths:
        yield from reported({"residues": residues, "blocks": 2}, timed(residues))


def profile(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield the operators that take most time on the device in a fold, and on the host."""
    import torch

    import fastfold

    model = network_of("model_1_ptm", device, "bf16", sizes)
    sequence, msa = random_target(sizes.lengths[1], sizes.rows)
    fastfold.predict(sequence, model, msa=msa, num_recycles=0)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=activities) as profiler:
        fastfold.predict(sequence, model, msa=msa, num_recycles=0)
    events = profiler.key_averages()
    keys = ("self_cpu_time_total", "self_device_time_total") if device == "cuda" else ("self_cpu_time_total",)
    for key in keys:
        for event in sorted(events, key=lambda one: -getattr(one, key))[:15]:
            yield {
                "time": key,
                "operator": event.key[:80],
                "count": event.count,
                "ms": getattr(event, key) / 1e3,
            }


@dataclass(frozen=True)
class Part:
    """A part of the program.

    Attributes:
        name: Its name.
        seconds: Its slot; it is killed after :data:`LIMIT` times as many.
        run: Function of the device and the sizes that yields its numbers.
    """

    name: str
    seconds: float
    run: Callable[[str, Sizes], Iterator[Line]]


PARTS = (
    Part("kernels", 60, kernels),
    Part("ceilings", 10, ceilings),
    Part("monomers", 80, monomers),
    Part("multimers", 50, multimers),
    Part("networks", 20, five_networks),
    Part("float32", 25, float32),
    Part("alphafold", 70, alphafold),
    Part("openfold", 40, openfold),
    Part("training", 45, training),
    Part("triangles", 25, triangles),
    Part("gluon", 20, gluon),
    Part("generic", 10, generic),
    Part("attention", 10, attention),
    Part("outer", 8, outer_products),
    Part("longest", 36, longest),
    Part("offload", 21, offload),
    Part("profile", 10, profile),
)

if __name__ == "__main__":
    sys.exit(main())
