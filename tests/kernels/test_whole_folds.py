"""Whole folds on a GPU: every part runs at toy size on a CPU, and one that fails does not stop the others."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import against_openfold
from benchmarks.gpu import compiling, deepmind, pack, rivals, timing, whole_folds
from benchmarks.gpu.attention_rows import attention, compare_rows
from benchmarks.gpu.comparing import MAX_ERROR, Comparison
from benchmarks.gpu.compiling import OPERATORS, RESIDUES, ROWS, compile_job
from benchmarks.gpu.outer_products import compare_chunks, outer_products
from benchmarks.gpu.rivals import generic, openfold, triangles
from benchmarks.gpu.whole_folds import PARTS, TOTAL_SECONDS, TOY, TOY_SECONDS, Part, run_apart
from benchmarks.kernels.cases import cases
from benchmarks.kernels.measuring import Meter, Timing
from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.ops.gated_attention import triton_rows
from fastfold.kernels.ops.outer_product_mean import chunks
from fastfold.kernels.ops.triangle_multiplication.triton_tiles import VARIABLE


def test_slots_fit_into_the_time() -> None:
    assert sum(part.seconds for part in PARTS) <= TOTAL_SECONDS <= 9 * 60
    assert [part.name for part in PARTS][:4] == ["kernels", "ceilings", "monomers", "multimers"]


def test_a_part_that_fails_hangs_or_has_no_time_is_a_line() -> None:
    (line,) = run_apart(Part("unknown", 60, whole_folds.ceilings), "cpu", toy=True, seconds=60)
    assert "StopIteration" in line["error"]
    (line,) = run_apart(Part("monomers", 0.4, whole_folds.monomers), "cpu", toy=True, seconds=60)
    assert line == {"skipped": "no time is left"}


def test_a_part_is_killed_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_folds, "MIN_SECONDS", 0.0)
    (line,) = run_apart(Part("training", 0.2, whole_folds.training), "cpu", toy=True, seconds=60)
    assert line["error"] == "killed after 0 s"
    assert line["wall_s"] < 20


BEHAVIOURS = """
import os, subprocess, sys, time

name = sys.argv[sys.argv.index("--part") + 1]
print('{"number": 1}', flush=True)
print("text", '{"cut', '{"number": 2} and more', sep="\\n", flush=True)
if name == "hangs":  # with a process that keeps the output open
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    time.sleep(60)
if name == "leaves":
    open(sys.argv[0] + ".left", "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
if name == "crashes":
    os.abort()
if name == "fails":
    raise MemoryError("no memory")
if name == "exits":
    sys.exit(3)
print('{"number": 3}')
"""


def _run_behaviour(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 60
) -> list[dict[str, Any]]:
    """Return the lines of a program that behaves by the name of its part."""
    program = folder / "parts.py"
    program.write_text(BEHAVIOURS)
    monkeypatch.setattr(whole_folds, "__file__", str(program))
    monkeypatch.setattr(whole_folds, "MIN_SECONDS", 0.0)
    return list(run_apart(Part(name, seconds, whole_folds.ceilings), "cpu", toy=True, seconds=60))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("crashes", "ended by SIGABRT"),
        ("fails", "ended with status 1.*MemoryError: no memory"),
        ("exits", "ended with status 3"),
    ],
)
def test_failures_are_told_apart_after_the_numbers_until_then(
    name: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is no JSON, or is cut off, is left out."""
    number, line = _run_behaviour(name, tmp_path, monkeypatch)
    assert number == {"number": 1}
    assert re.match(error, line["error"])


def test_a_hanging_part_ends_although_its_output_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, line = _run_behaviour("hangs", tmp_path, monkeypatch, seconds=1.0)
    assert number == {"number": 1}
    assert line["error"] == "killed after 2 s"
    assert line["wall_s"] < 20


def test_processes_that_a_part_leaves_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would use the device during later parts."""
    first, last, line = _run_behaviour("leaves", tmp_path, monkeypatch)
    assert [first, last] == [{"number": 1}, {"number": 3}]
    assert "error" not in line
    status = Path("/proc", (tmp_path / "parts.py.left").read_text(), "status")
    end = time.monotonic() + 20
    while status.exists() and "State:\tZ" not in status.read_text():  # a process that nothing waits for yet
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_job_that_does_not_compile_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does DeepMind's program; stand-ins take the place of both."""

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(compiling, "ProcessPoolExecutor", lambda *arguments: ThreadPoolExecutor(1))
    monkeypatch.setattr(compiling, "compile_job", lambda name, *others: 1.0 if name in OPERATORS else fail())
    monkeypatch.setattr(compiling, "compilations", lambda *arguments: {12: None})
    monkeypatch.setattr(compiling, "answers", fail)
    lines = {line["compiled"]: line for line in compiling.kernels("cpu", TOY)}
    assert lines["residual_update"]["seconds"] == 1.0
    assert lines["model_1_ptm"]["error"] == lines["AlphaFold"]["error"] == "RuntimeError: does not compile"


def test_small_sizes_have_all_the_time_that_a_busy_machine_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only official sizes end with the nine minutes."""
    given: list[tuple[float, float]] = []

    def run(part: Part, device: str, *, toy: bool, seconds: float) -> Iterator[dict[str, Any]]:
        given.append((part.seconds, seconds))
        yield {}

    monkeypatch.setattr(whole_folds, "run_apart", run)
    whole_folds.main(["--toy", "--out", str(tmp_path)])
    assert given == [(TOY_SECONDS, math.inf)] * len(PARTS)
    given.clear()
    whole_folds.main(["--out", str(tmp_path)])
    assert [seconds for seconds, _ in given] == [part.seconds for part in PARTS]
    assert all(0 < left <= TOTAL_SECONDS for _, left in given)


def test_lines_have_the_times_of_host_and_device() -> None:
    lines = list(whole_folds.monomers("cpu", TOY))
    assert [(line["residues"], line["run"]) for line in lines] == [(12, 0), (12, 1), (17, 0), (17, 1)]
    for line in lines:
        assert 0 < line["host_ms"] <= line["wall_ms"] <= 2e3 * line["mean_fold_s"]
        assert (line["precision"], line["graphs"], line["passes"]) == ("bf16", False, 4)


def test_a_fold_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a CUDA graph cannot be recorded; a stand-in takes the folds' place."""

    def timed(network: Any, residues: int, *others: Any, graphs: bool) -> Iterator[dict[str, Any]]:
        yield {"run": 0}
        if residues == 12:
            raise RuntimeError("no graph")

    monkeypatch.setattr(whole_folds, "timed_folds", timed)
    lines = list(whole_folds.monomers("cpu", TOY))
    assert [(line["residues"], line.get("run"), line.get("error")) for line in lines] == [
        (12, 0, None),
        (12, None, "RuntimeError: no graph"),
        (17, 0, None),
    ]


def test_nothing_is_timed_without_a_result_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first variant fails, the second is not finite; a stand-in takes the clock's place."""

    def fail() -> Any:
        raise RuntimeError("refused")

    monkeypatch.setattr(Meter, "time", lambda self, function, sets: Timing(1.5, 2.5, 0.0, 0.0))
    meter, result = Meter(torch.device("cpu"), 0.0), torch.ones(3)
    comparison = Comparison(meter)
    assert comparison.measure(fail) == {"error": "RuntimeError: refused"}
    assert comparison.measure(lambda: [result]).keys() == {"error"}
    comparison = Comparison(meter)
    assert comparison.measure(lambda: [result, result])["device_ms"] == 1.5
    wrong = comparison.measure(lambda: [result, result / 0 * 0])
    assert wrong["error"] == f"differs from the first variant by more than {MAX_ERROR}"
    assert "device_ms" not in wrong
    assert comparison.measure(fail) == {"error": "RuntimeError: refused"}


def test_kernels_of_operators_and_networks_are_compiled() -> None:
    """Each name is an operator of the benchmark; a job computes outputs and gradients."""
    assert set(OPERATORS) <= {case.operator for case in cases((RESIDUES,), ((ROWS, RESIDUES),))}
    assert compile_job("residual_update", "gradients", "cpu") > 0


def test_five_networks_fold_one_target() -> None:
    lines = list(whole_folds.five_networks("cpu", TOY))
    assert [(line["call"], line["networks"], line["graphs"]) for line in lines] == [
        ("first", 5, False),
        ("second", 5, False),
    ]


def test_triangle_multiplications_are_timed_in_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that choose kernels are as before afterwards."""
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.delenv(rivals.PREBUILT, raising=False)
    lines = list(triangles("cpu", TOY))
    assert [line["variant"] for line in lines][:3] == ["groups", "all channels", "tiles"]
    assert all(line["device_ms"] > 0 for line in lines)
    (line,) = generic("cpu", TOY)
    assert line == {"skipped": "cuequivariance_torch is not installed"}
    assert os.environ[VARIABLE] == "0"
    assert rivals.PREBUILT not in os.environ


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
def test_attentions_by_one_kernel_are_compared_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result is an error and is not timed; a stand-in takes the clock's place."""
    timing = Timing(1.5, 2.5, 0.0, 0.0)
    monkeypatch.setattr(Meter, "time", lambda self, function, sets: timing)
    sizes = replace(TOY, block_rows=(0, 1), block_lengths=(3, triton_rows.MAX_LENGTH + 1))
    lines = list(compare_rows("cpu", sizes))
    assert [(line["attention"], line["variant"]) for line in lines] == [
        (name, variant)
        for name in ("rows of the alignment", "columns of the alignment", "triangle")
        for variant in ("separate", "rows")
    ]
    assert {(line["device_ms"], line["host_ms"]) for line in lines} == {(1.5, 2.5)}
    assert [line["relative_error"] == 0 for line in lines[::2]] == [True] * 3
    assert list(attention("cpu", sizes)) == [
        {"skipped": "needs an A100 or a Hopper GPU (compute capability 8.0 or 9.0)"}
    ]
    right = triton_rows.attend_rows
    monkeypatch.setattr(triton_rows, "attend_rows", lambda *arguments: 2 * right(*arguments))
    _, line = itertools.islice(compare_rows("cpu", sizes), 2)
    assert line["variant"] == "rows"
    assert "error" in line
    assert "device_ms" not in line


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
def test_outer_products_in_chunks_are_compared_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result is an error and is not timed; a stand-in takes the clock's place."""
    monkeypatch.setattr(Meter, "time", lambda self, function, sets: Timing(1.5, 2.5, 0.0, 0.0))
    sizes = replace(TOY, block_lengths=(3,))
    lines = list(compare_chunks("cpu", sizes, (2,)))
    assert [(line["pass"], line["variant"]) for line in lines] == [
        *(("forward", "kernels"), ("forward", "chunks")),
        *(("backward", "kernels"), ("backward", "chunks")),
    ]
    assert {(line["device_ms"], line["host_ms"]) for line in lines} == {(1.5, 2.5)}
    assert [line["relative_error"] for line in lines[::2]] == [0, 0]
    assert all(line["relative_error"] > 0 for line in lines[1::2])  # another order of sums
    assert list(outer_products("cpu", sizes)) == [{"skipped": "needs a GPU"}]
    right = chunks.backward
    monkeypatch.setattr(chunks, "backward", lambda *arguments: [2 * x for x in right(*arguments)])
    *_, line = compare_chunks("cpu", sizes, (2,))
    assert line["variant"] == "chunks"
    assert "error" in line
    assert "device_ms" not in line


def test_blocks_run_beside_openfolds_if_there_is_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in takes OpenFold's place."""
    monkeypatch.setattr(rivals, "REPOSITORY", tmp_path)
    (tmp_path / ".gpu" / "openfold").mkdir(parents=True)

    class Blocks:
        def __init__(self, checkout: Path, case: Any) -> None:
            assert checkout == tmp_path / ".gpu" / "openfold"
            self.modules = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

        def infer(self, inputs: Any, pieces: bool) -> Any:
            assert {x.dtype for x in inputs} == {self.modules[0].weight.dtype} == {torch.bfloat16}

    monkeypatch.setattr(against_openfold, "OpenFoldBlocks", Blocks)
    lines = list(openfold("cpu", TOY))
    assert [(line["program"], line["call"]) for line in lines] == [
        *(("FastFold", "first"), ("FastFold", "second")),
        *(("OpenFold", "first"), ("OpenFold", "second")),
    ]


def test_alphafolds_part_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPOSITORY", tmp_path)
    assert list(deepmind.alphafold("cpu", TOY)) == [{"skipped": "no checkout in .gpu/alphafold"}]
    (tmp_path / ".gpu" / "alphafold").mkdir(parents=True)
    monkeypatch.setattr(deepmind.importlib.util, "find_spec", lambda name: None)
    assert list(deepmind.alphafold("cpu", TOY)) == [{"skipped": "jax is not installed"}]
    assert deepmind.compilations("cpu", TOY, tmp_path) == {}


PROGRAM = """
import json, os, sys
import numpy as np

print(json.dumps({"jax": "none"}))
for line in sys.stdin:
    request = json.loads(line)
    assert np.load(request["features"])["aatype"].shape == (4, 12)
    path = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "compiled")
    if request["compile_only"]:
        open(path, "w").close()
        print(json.dumps({"seconds": 1.5}))
    elif os.path.exists(path):
        print(json.dumps({"first": 3.0, "seconds": 2.0}))
    else:
        sys.exit("not compiled")
"""


def test_alphafold_is_compiled_before_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in takes the program's place; its failure is an error with its message."""
    monkeypatch.setattr(timing, "REPOSITORY", tmp_path)
    monkeypatch.setattr(deepmind, "CACHE", tmp_path)
    monkeypatch.setattr(deepmind, "missing", lambda: None)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "alphafold_program.py").write_text(PROGRAM)
    (line,) = deepmind.alphafold("cpu", TOY)
    assert "not compiled" in line["error"]
    ((residues, program),) = deepmind.compilations("cpu", TOY, tmp_path).items()
    assert residues == 12
    assert deepmind.answers(program) == [{"jax": "none"}, {"seconds": 1.5}]
    lines = list(deepmind.alphafold("cpu", TOY))
    assert [(line["residues"], line["fold"], line["fold_s"]) for line in lines] == [
        (12, "first", 3.0),
        (12, "second", 2.0),
    ]


@pytest.mark.long
def test_all_parts_run_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whole_folds.main(["--device", "cpu", "--toy", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "whole_folds.jsonl").read_text().splitlines()]
    assert {line["part"] for line in lines} == {part.name for part in PARTS}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    long = next(line for line in lines if line["part"] == "longest" and "planned_gib" in line)
    assert long["residues"] == 24


def test_packages_are_unpacked_and_weighed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(command: list[str], *, check: bool) -> None:
        assert check
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            wheel.writestr("thing/__init__.py", "x = 1\n")

    checkout = tmp_path / "checkout"
    names = (
        "__init__",
        "common/protein",
        "model/tf/__init__",
        "model/modules",
        "model/modules_test",
        "model/tf/shape_placeholders",
        "model/tf/pipeline",
    )
    for name in (f"alphafold/{stem}.py" for stem in names):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    monkeypatch.setattr(pack, "PACKED", tmp_path / "packed")
    monkeypatch.setattr(pack.subprocess, "run", download)
    other = tmp_path / "other" / "openfold" / "model"
    other.mkdir(parents=True)
    (other / "evoformer.py").write_text("")
    arguments = ["--alphafold", str(checkout), "--openfold", str(other.parents[1])]
    monkeypatch.setattr("sys.argv", ["pack.py", *arguments])
    pack.main()
    files = {path.relative_to(pack.PACKED).as_posix() for path in pack.PACKED.rglob("*.py")}
    assert files == {
        "site/thing/__init__.py",
        "alphafold/alphafold/__init__.py",
        "alphafold/alphafold/common/protein.py",
        "alphafold/alphafold/model/modules.py",
        "alphafold/alphafold/model/tf/__init__.py",
        "alphafold/alphafold/model/tf/shape_placeholders.py",
        "openfold/openfold/model/evoformer.py",
    }
    assert "0.0 MiB of at most 64" in capsys.readouterr().out
    monkeypatch.setattr(pack, "LIMIT_BYTES", 1)
    with pytest.raises(SystemExit, match="too large"):
        pack.main()
    monkeypatch.setattr(pack, "LIMIT_BYTES", 1 << 20)
    (checkout / "alphafold" / "model" / "tf" / "shape_placeholders.py").unlink()
    with pytest.raises(SystemExit, match=r"no alphafold/model/tf/shape_placeholders\.py in .*--alphafold"):
        pack.main()
