"""Parts of ``whole_folds.py`` that compare operators and blocks with other programs, and steps with Gemini."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.gpu.comparing import Comparison, times
from benchmarks.gpu.timing import REPOSITORY, Line, Sizes, Stopwatch, network_of, reported

PREBUILT = "CUEQ_TRIMUL_KF_CAMPAIGN"
"""cuEquivariance's environment variable for its prebuilt kernels of triangle multiplication."""


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside, and restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def openfold(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield forward passes of Evoformer blocks in bf16, and of OpenFold's if ``.gpu/openfold`` has its checkout."""
    import torch

    from benchmarks.against_openfold import Case, OpenFoldBlocks, make_inputs, randomize
    from fastfold.evoformer.execution import set_policy
    from fastfold.inference.planning.planner import folding_policy

    checkout, (rows, number) = REPOSITORY / ".gpu" / "openfold", sizes.block_rows
    ours = network_of("model_1", "cpu", "bf16", replace(sizes, blocks=number)).evoformer.to(device)
    set_policy(ours, folding_policy(device))
    programs: dict[str, Callable[..., Any]] = {"FastFold": ours}
    if checkout.is_dir():
        theirs = OpenFoldBlocks(checkout, Case(number, rows, 1))
        randomize(theirs.modules)
        theirs.modules.to(device, torch.bfloat16)
        programs["OpenFold"] = lambda *inputs: theirs.infer(inputs, False)
    else:
        yield {"skipped": "no checkout in .gpu/openfold"}

    def timed(run: Callable[..., Any], residues: int) -> Iterator[Line]:
        inputs = [x.to(device, torch.bfloat16) for x in make_inputs(Case(number, rows, residues))]
        watch = Stopwatch(device)
        for call in ("first", "second"):
            own = [x.clone() for x in inputs]  # the blocks overwrite them
            with torch.inference_mode(), watch.measuring():
                run(*own)
            yield {"call": call} | watch.line()

    for residues, (program, run) in itertools.product(sizes.block_lengths, programs.items()):
        line: Line = {"program": program, "blocks": number, "rows": rows, "residues": residues}
        yield from reported(line, timed(run, residues))


def triangles(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield triangle multiplications in bf16: in groups of channels, with all, by tiles, and by cuEquivariance."""
    import torch

    from benchmarks.kernels.cases import cases
    from benchmarks.kernels.measuring import Inputs, Meter
    from benchmarks.kernels.rivals import implementations
    from fastfold import kernels
    from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
    from fastfold.kernels.ops.triangle_multiplication.triton_tiles import VARIABLE

    meter = Meter(torch.device(device), 0.1 if device == "cuda" else 0.0)

    def ours(channels: int | None) -> Callable[[Inputs], object]:
        def call(inputs: Inputs) -> object:
            z, mask, *parameters = inputs.values()
            return kernels.triangle_multiplication(
                z,
                mask,
                kernels.TriangleParams(*parameters),
                outgoing=True,
                residual=z,
                out=torch.empty_like(z),
                plan=ContractionPlan(channels),
            )

        return call

    variants = {"groups": ours(None), "all channels": ours(128), "tiles": ours(128)}
    for rival in implementations("triangle_multiplication", meter.device):
        if rival.name == "cuequivariance":
            variants[rival.name] = lambda inputs, function=rival.function: function(**inputs)
    for case in cases(tuple(sizes.triangle_lengths), ()):
        if case.operator != "triangle_multiplication":
            continue
        sets = meter.sets(case.make(meter.device, torch.bfloat16))

        def timed(name: str, sets: list[Inputs]) -> Iterator[Line]:
            with torch.no_grad(), environment(VARIABLE, "1" if name == "tiles" else "0"):
                line = times(meter.time(variants[name], sets))
            yield line

        for name in variants:
            yield from reported({"residues": case.residues, "variant": name}, timed(name, sets))


def generic(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield what :func:`triangles` yields of cuEquivariance, without its prebuilt kernels."""
    with environment(PREBUILT, "0"):  # read when the package is imported
        lines = [line for line in triangles(device, sizes) if line["variant"] == "cuequivariance"]
    yield from lines or [{"skipped": "cuequivariance_torch is not installed"}]


def gluon(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield what :func:`compare_halves` yields, on a Hopper GPU."""
    import torch

    if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        yield from compare_halves(device, sizes)
    else:
        yield {"skipped": "needs a Hopper GPU (compute capability 9.0)"}


def compare_halves(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield errors and times of both halves of triangle multiplication in bf16: by tiles, and by the trial in Gluon.

    Results are compared with those of the other kernels, first at a length whose last tile is not full. A line with an
    ``error`` is a wrong result, which is not timed.
    """
    import torch

    from benchmarks.kernels.cases import cases
    from benchmarks.kernels.measuring import Meter

    meter = Meter(torch.device(device), 0.1 if device == "cuda" else 0.0)
    lengths = [length for each in sizes.triangle_lengths for length in (each - 3, each)]
    for case in cases(tuple(lengths), ()):
        if case.operator != "triangle_multiplication":
            continue
        comparisons: dict[str, Comparison] = {}
        for half, variant, call in triangle_halves(case.make(meter.device, torch.bfloat16)):
            comparison = comparisons.setdefault(half, Comparison(meter))
            line: Line = {"residues": case.residues, "half": half, "variant": variant}
            yield line | comparison.measure(call)


def triangle_halves(inputs: dict[str, Any]) -> Iterator[tuple[str, str, Callable[[], list[Any]]]]:
    """Yield each half and variant, and the call that returns its tensor; the variant that is right comes first."""
    import torch

    from benchmarks.gpu import gluon_tiles
    from fastfold.kernels import TriangleParams
    from fastfold.kernels.common.layout import padded_width
    from fastfold.kernels.ops.triangle_multiplication import triton_factors, triton_tiles, triton_update

    z, mask, *parameters = inputs.values()
    weights, width = TriangleParams(*parameters), padded_width(z.shape[1])
    count = len(weights.proj_weight) // 2
    projections: dict[str, Callable[..., None]] = {
        "plain": lambda out: triton_factors.project(out, z, mask, weights.factors, 0, count),
        "tiles": lambda out: triton_tiles.project_tiles(out, z, mask, weights.factors, 0, count),
        "gluon": lambda out: gluon_tiles.project(out, z, mask, weights.factors),
    }
    for variant, project in projections.items():
        factors = z.new_full((2 * count, width, width), torch.nan)
        yield "projection", variant, _filling(project, factors)
    product = torch.randn(count, width, width, device=z.device).to(z.dtype)
    updates: dict[str, Callable[..., None]] = {
        "plain": lambda out: triton_update.write_update(out, product, z, weights.update, z, None),
        "tiles": lambda out: triton_tiles.write_update_tiles(out, product, z, weights.update, z, None),
        "gluon": lambda out: gluon_tiles.write_update(out, product, z, weights.update),
    }
    for variant, update in updates.items():
        out = torch.full_like(z, torch.nan)
        yield "output", variant, _filling(update, out)


def _filling(fill: Callable[..., None], out: Any) -> Callable[[], list[Any]]:
    """Return a call that fills ``out`` and returns it."""

    def call() -> list[Any]:
        fill(out)
        return [out]

    return call


def offload(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield training steps without a memory manager, and by Gemini with half of their memory."""
    import torch

    from benchmarks.long_sequence import features
    from fastfold.memory import CudaDevice, Gemini, GeminiConfig, SimulatedDevice

    residues, rows, extra = sizes.crops[0]
    batch = {name: value.to(device)[None] for name, value in features(residues, rows, extra).items()}
    budget = 1 << 40
    for share, steps in ((1.0, 2), (0.5, 6 if device == "cuda" else 2)):  # a manager records the first steps
        is_managed = share < 1.0
        model = network_of("model_1_ptm", "cpu" if is_managed else device, "bf16", sizes).train()
        stepper: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
        memory: Any = SimulatedDevice(budget)
        if device == "cuda":
            memory = CudaDevice(budget, torch.device(device))
        if is_managed:
            stepper = Gemini(model, stepper, GeminiConfig(budget, device=memory))
        watch = Stopwatch(device)
        line: Line = {"crop": residues, "rows": rows, "extra_rows": extra, "memory": share}
        line["budget_gib"] = round(budget / 2**30, 3) if is_managed else None
        for step in range(steps):
            with watch.measuring(), memory.running():
                result = model(batch, 0)
                loss = result["representations"]["pair"].float().square().mean()
                (loss + result["structure_module"]["final_atom_positions"].square().mean()).backward()
            stepper.step()
            stepper.zero_grad()
            yield line | {"step": step} | watch.line()
        held = 0 if device == "cuda" else sum(x.nbytes for x in model.parameters())
        budget = int((memory.mark() + held) / 2)
