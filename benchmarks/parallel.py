"""Parallelism in numbers: bytes that a block sends, communication that is hidden, and scaling to 512 GPUs.

Usage: python benchmarks/parallel.py [--quick] [--gpu h200] [--measured FILE] [--markdown OUT] [--json OUT]

1. Bytes per rank of one Evoformer block at 1 to 512 ranks, counted from its collectives' shapes on PyTorch's
   fake process group, for dynamic axial parallelism and for the 2D grid, against FastFold's formula.
2. Number of collectives and operators of a block, and of collectives without concurrent computation.
3. Share of communication that the asynchronous schedule hides, on two gloo processes with an artificial network.
4. Memory of a rank, counted on the fake process group.
5. Strong scaling of AlphaFold's initial training to 512 GPUs by the cost model, with its assumptions.
6. Cost model against published steps.

Only 3 measures time, in computing time of the thread, so that a busy machine gives the same numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.block_communication import block_communication, fastfold_elements  # noqa: E402
from benchmarks.overlap import count_schedule, measure_overlap  # noqa: E402
from benchmarks.published_steps import published_rows, published_table  # noqa: E402
from benchmarks.rank_memory import rank_memory  # noqa: E402
from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.parallel import ParallelPlan, best_plans  # noqa: E402
from fastfold.parallel.alphafold.workload import alphafold_workload  # noqa: E402
from fastfold.parallel.planner.cost_model import Cost  # noqa: E402
from fastfold.parallel.planner.hardware import rates  # noqa: E402
from fastfold.parallel.planner.search import assumptions_text, seconds_text  # noqa: E402
from fastfold.parallel.planner.workload import standard_layouts  # noqa: E402
from fastfold.utils.atomic_files import write_atomic  # noqa: E402

RANKS = (1, 2, 4, 8, 64, 512)
RESIDUES, SEQUENCES = (256, 384, 2048), (128, 512)
GPUS = (1, 8, 64, 128, 256, 512)
RATIOS = (0.1, 0.25, 0.5, 1.0)
COUNTED_BACKWARD = 64
SCHEDULES = (
    *((ranks, 96, 64) for ranks in (1, 2, 8)),
    *((ranks, 256, 128) for ranks in (1, 2, 4, 8, 64)),
    *((ranks, 384, 512) for ranks in (2, 8)),
)
MEMORY_RANKS = (1, 2, 4, 8)
MEMORY_SIZE = {"residues": 256, "msa": 128, "extra_msa": 256}


def grid_plan(ranks: int) -> ParallelPlan | None:
    """Return the plan with the most square grid of ``ranks`` ranks; None for 1 and 2."""
    found = [plan for plan in standard_layouts(dap=ranks, grid=True)(ranks) if plan.dap_mode == "grid"]
    return found[0] if found else None


def communication(quick: bool) -> list[dict[str, Any]]:
    """Count the bytes that a rank sends in a block's passes; backward on up to 64 ranks.

    Counts are those of the rank that sends most; axial parallelism also has the mean over all ranks. With axial
    parallelism rank 0 sends most, because its shards are the longest. On a grid, rank 0 keeps a part of the tensors
    that are transposed, which the last rank of its row does not.
    """
    rows = []
    for residues in RESIDUES[: 1 if quick else None]:
        for sequences in SEQUENCES[: 1 if quick else None]:
            for ranks in RANKS[: 4 if quick else None]:
                row: dict[str, Any] = {"residues": residues, "sequences": sequences, "ranks": ranks}
                row["fastfold"] = 4 * fastfold_elements(ranks, residues, sequences)
                for name, plan in (("dap", ParallelPlan(dap=ranks)), ("grid", grid_plan(ranks))):
                    if plan is None:
                        continue
                    size = {
                        "residues": residues,
                        "sequences": sequences,
                        "backward": ranks <= COUNTED_BACKWARD,
                    }
                    places = (0,) if name == "dap" else (0, plan.dap_grid[1] - 1)
                    logs = [block_communication(plan, rank=rank, **size) for rank in places]
                    row[name] = max(forward.sent for forward, _ in logs)
                    if ranks <= COUNTED_BACKWARD:
                        row[f"{name}_backward"] = max(backward.sent for _, backward in logs)
                row["dap_mean"] = mean_over_ranks(ranks, residues, sequences, row["dap"])
                rows.append(row)
    return rows


def mean_over_ranks(ranks: int, residues: int, sequences: int, first: float) -> float:
    """Return the mean of sent bytes over the ranks of axial parallelism.

    Ranks with equal shards send equally.

    Args:
        ranks: Number of ranks.
        residues: N.
        sequences: Rows of the MSA.
        first: Bytes that rank 0 sends.
    """
    # From these ranks on, shards are one element shorter.
    starts = sorted({0, residues % ranks, sequences % ranks})
    total = 0.0
    for start, end in zip(starts, [*starts[1:], ranks], strict=True):
        sent = first
        if start:
            size = {"residues": residues, "sequences": sequences, "rank": start, "backward": False}
            sent = block_communication(ParallelPlan(dap=ranks), **size)[0].sent
        total += (end - start) * sent
    return total / ranks


def communication_table(rows: list[dict[str, Any]]) -> str:
    """Format the bytes as Markdown, in MB of float32."""
    lines = [
        "| residues | MSA | ranks | FastFold | DAP, mean | DAP, most | grid, most | better / FastFold | backward |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        forward = min(row["dap_mean"], row.get("grid", row["dap_mean"]))
        backward = [row[name] for name in ("dap_backward", "grid_backward") if name in row]
        shares = [
            f"{better / row['fastfold']:.2f}" if better is not None and row["fastfold"] else "-"
            for better in (forward, min(backward, default=None))
        ]
        cells = [
            f"{row[name] / 1e6:.1f}" if name in row else "-"
            for name in ("fastfold", "dap_mean", "dap", "grid")
        ]
        lines.append(
            f"| {row['residues']} | {row['sequences']} | {row['ranks']} | {' | '.join([*cells, *shares])} |"
        )
    return "\n".join(lines)


def _overlap_rank(rank: int, store: str, folder: str, quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    size = (64, 32) if quick else (128, 64)
    found = measure_overlap(2, *size, RATIOS, latency=20e-6)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def overlap(quick: bool) -> dict[str, Any]:
    """Measure the overlap on two gloo processes, and return rank 0's numbers."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "store"), folder, quick)
        torch.multiprocessing.spawn(_overlap_rank, arguments, nprocs=2)
        found: dict[str, Any] = json.loads(Path(folder, "0.json").read_text())
    return found


def overlap_table(found: dict[str, Any]) -> str:
    """Format the networks as Markdown, one per line."""
    lines = ["| communication / computation | hidden | step, asynchronous / immediate |", "|---|---|---|"]
    for network in found["networks"]:
        speed = network["asynchronous_seconds"] / network["immediate_seconds"]
        lines.append(f"| {network['ratio']:g} | {network['asynchronous_hidden']:.0%} | {speed:.2f} |")
    return "\n".join(lines)


def schedules(quick: bool) -> list[dict[str, Any]]:
    """Count collectives and operators of a block's passes, for several numbers of ranks and sizes."""
    rows = []
    for ranks, residues, sequences in SCHEDULES[: 3 if quick else None]:
        forward, backward = count_schedule(ranks, residues, sequences)
        size = {"ranks": ranks, "residues": residues, "sequences": sequences}
        rows.append(size | {"forward": asdict(forward), "backward": asdict(backward)})
    return rows


def schedule_table(rows: list[dict[str, Any]]) -> str:
    """Format the schedules as Markdown, one per line."""
    lines = [
        "| ranks | residues | MSA | collectives | waited for at once | operators | kernels | packing |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        each = [
            f"{row['forward'][name]} / {row['backward'][name]}"
            for name in ("collectives", "waited_at_once", "dispatches", "kernels", "packing")
        ]
        size = f"{row['ranks']} | {row['residues']} | {row['sequences']}"
        lines.append(f"| {size} | {' | '.join(each)} |")
    return "\n".join(lines)


def memory(quick: bool) -> list[dict[str, Any]]:
    """Count rank 0's memory under axial parallelism, in U, for folding and training."""
    size = {"residues": 64, "msa": 32, "extra_msa": 64} if quick else MEMORY_SIZE
    return [
        {"ranks": ranks} | size | asdict(rank_memory(ParallelPlan(dap=ranks), **size))
        for ranks in MEMORY_RANKS
    ]


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Format the memory in U as Markdown, with the total of all ranks."""
    lines = [
        "| ranks | folding, peak | block, all kept | block, recomputed | times ranks |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        held = [row[name] for name in ("folding", "block", "checkpoint")]
        together = " / ".join(f"{x * row['ranks']:.1f}" for x in held)
        lines.append(f"| {row['ranks']} | {' | '.join(f'{x:.2f} U' for x in held)} | {together} |")
    return "\n".join(lines)


def scaling(gpu: str, measured: Path | None, quick: bool) -> tuple[list[dict[str, Any]], str]:
    """Return the best plan for each number of GPUs, and the assumptions."""
    speeds = rates(gpu, measured=measured)
    workload = alphafold_workload(model_config("model_1"), name="model_1")
    rows: list[dict[str, Any]] = []
    for gpus in GPUS[: 2 if quick else None]:
        best = best_plans(workload, gpus=gpus, gpu=speeds, count=1)[0]
        rows.append(_scaling_row(gpus, best))
    first = rows[0]
    for row in rows:
        row["speedup"] = first["seconds"] / row["seconds"]
        row["efficiency"] = row["speedup"] * first["gpus"] / row["gpus"]
    text = (
        f"{workload.name}: {workload.description}; without the loss.\n\n```\n{assumptions_text(speeds)}\n```"
    )
    return rows, text


def _scaling_row(gpus: int, cost: Cost) -> dict[str, Any]:
    plan = cost.plan
    return {
        "gpus": gpus,
        "plan": f"{plan}, zero {plan.zero}" + ("" if cost.checkpointing else ", activations kept"),
        "seconds": cost.seconds,
        "computing": cost.compute,
        "communicating": cost.communication + cost.synchronization,
        "waiting": cost.waiting + cost.imbalance,
        "calibrated": cost.calibrated,
        "memory_gib": cost.total_memory / 1024**3,
        "petaflops": cost.model_flops / cost.seconds / 1e15,
    }


def scaling_table(rows: list[dict[str, Any]]) -> str:
    """Format the plans as Markdown, one number of GPUs per line."""
    step = "step" if all(row["calibrated"] for row in rows) else "step (uncalibrated)"
    lines = [
        f"| GPUs | plan | {step} | communication | memory per GPU | PFLOP/s | speed-up | efficiency |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['gpus']} | {row['plan']} | {seconds_text(row['seconds'])} | "
            f"{row['communicating'] / row['seconds']:.1%} | {row['memory_gib']:.1f} GiB | {row['petaflops']:.2f} | "
            f"{row['speedup']:.0f} | {row['efficiency']:.0%} |"
        )
    return "\n".join(lines)


def machine() -> str:
    """Describe the machine."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{os.cpu_count()} cores, {name}, Python {platform.python_version()}, torch {torch.__version__}"


def measure(quick: bool, gpu: str, measured: Path | None) -> dict[str, Any]:
    """Measure and count all numbers."""
    scaled, assumptions = scaling(gpu, measured, quick)
    return {
        "machine": machine(),
        "communication": communication(quick),
        "schedules": schedules(quick),
        "overlap": overlap(quick),
        "memory": memory(quick),
        "scaling": scaled,
        "assumptions": assumptions,
        "published": published_rows(),
    }


def report(numbers: dict[str, Any]) -> str:
    """Format the numbers of :func:`measure` as Markdown."""
    hidden, held = numbers["overlap"], numbers["memory"][0]
    return f"""# Parallelism

Machine: {numbers["machine"]}. No number here was measured on a GPU.

## Communication of one Evoformer block

MB that a rank sends in the forward pass, float32, widths 256 and 128, counted on the fake process group. FastFold's
formula is (N - 1) / N · [272 r² + 32 s r + 512 (s r + r²) / N] elements. Where the ranks do not divide an axis (512
ranks for 256 residues, say) those with the longest shards send more than the mean, which the formula gives. The
grid is as square as the number of ranks permits; one and two ranks have none. The last two columns are the
lesser of DAP and grid over FastFold, forward (of DAP the mean, of the grid the rank that sends most) and backward
(also the rank that sends most; counted up to {COUNTED_BACKWARD} ranks). The backward pass sends as much as the forward
pass. On up to 128 ranks, DAP sends in it again the biases, and the left projection of an outer product that is not
deeper than long.

On 2 and 3 ranks, and on more ranks than channels, DAP reduce-scatters all terms of triangle products, 256 r². On other
numbers it reshards factors to whole channels and the products back, 768 r² / N, which takes one message more. On up to
8 ranks it reduce-scatters gradients if that costs at most 24 MiB per product more than resharding. 16 r² of biases and
32 s r of projections, the latter not on the grid, do not fall with N.

{communication_table(numbers["communication"])}

## Collectives and operators of one block

Evoformer block under axial parallelism, forward / backward pass with all activations kept, float32, counted on shapes.
A collective is waited for at once if neither a matrix product nor a kernel of this package is started before. Tensors
sent at one time share a message, unless it is 4 MiB or more and not needed at once. Kernels are those that operators
declare for a GPU; packing kernels pack tensors into messages and unpack them.

{schedule_table(numbers["schedules"])}

## Overlap

{hidden["ranks"]} gloo processes with one thread each, one Evoformer block at {hidden["residues"]} residues and
{hidden["sequences"]} sequences under axial parallelism, forward and backward: {hidden["computing_seconds"]:.2f} s of
computation, {hidden["messages"]} collectives with {hidden["megabytes"]:.1f} MB. The network between them is artificial:
messages take its link one after another and arrive {hidden["latency_seconds"] * 1e6:.0f} µs later. Its bandwidth is
chosen so that communication takes as long as the first column says; hidden is the share of that time in which no
process waits for a message. Time is computing time of the thread. If every collective is waited for at once, nothing
is hidden.

{overlap_table(hidden)}

## Memory of a rank

Rank 0 of the network of `model_1_ptm` under axial parallelism, {held["residues"]} residues, MSA {held["msa"]}, extra
MSA {held["extra_msa"]}, float32, in U = N² · 128 · 4 bytes; parameters and features not counted. Folding: the most that
exists at a time, with blocks as small relative to the pair as those of 2,000 residues. Block: memory that an Evoformer
block of training keeps for its backward pass, with all activations and with activations computed again. From two ranks
on a block keeps 1/P of everything except masks. The step from one rank to two gains less: the operator of one process
keeps only the input of a triangle multiplication. Ranks also keep the product, which took a message, and with outgoing
edges the pair in both layouts, or factors and product if both were resharded. On more ranks a fold also needs memory
for blocks of channels in transfer.

{memory_table(numbers["memory"])}

## Strong scaling of initial training, by the cost model

{scaling_table(numbers["scaling"])}

{numbers["assumptions"]}

PFLOP/s count the model's operations: those of the forward passes, and twice those of the pass with gradients.

## Cost model against published steps

The steps are of other programs. A block here moves less memory and starts fewer kernels than theirs; fitted constants
compensate for that. If the kernels here reach more of a GPU than theirs, steps are shorter than predicted.

{published_table(numbers["published"])}
"""


def main() -> None:
    """Print the report, and write it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    parser.add_argument("--gpu", default="h200", help="GPU of the scaling table")
    parser.add_argument("--measured", type=Path, help="JSON of measured rates (fastfold plan --measured)")
    parser.add_argument("--markdown", type=Path, help="write the report to this file")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    numbers = measure(options.quick, options.gpu, options.measured)
    text = report(numbers)
    print(text)
    if options.markdown:
        write_atomic(options.markdown, text)
    if options.json:
        write_atomic(options.json, json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
