"""Peak memory and time of long sequences on one device.

Usage: python benchmarks/long_sequence.py --residues N [N ...] [--blocks B] [--msa S] [--extra-msa E]
       [--dtype fp32|bf16] [--part stack|network] [--memory-budget SIZE] [--host-memory SIZE | --no-host]
       [--device auto] [--simulate] [--json OUT]

``stack`` is the Evoformer stack on random inputs; its peak is counted above them. ``network`` is the whole network,
with four templates, structure module and heads, and B blocks in each stack; its peak is the total. Memory is
the peak of the resident set above the baseline on a CPU (Linux), and of PyTorch's allocator on a GPU. U is the pair
tensor, N² · c_z · bytes per element. For several N the growth exponents of time and memory are fitted. Sizes of
blocks and the host's part follow from the budget, as in ``fastfold infer``; ``--plain`` runs without them.
``--simulate`` counts the memory of a GPU with the budget, for the network with one recycle, on tensors without
contents: no measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import torch  # noqa: E402

from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.evoformer.evoformer import EvoformerBlock, EvoformerStack  # noqa: E402
from fastfold.evoformer.execution import ExecutionPolicy, set_policy  # noqa: E402
from fastfold.evoformer.model import AlphaFold  # noqa: E402
from fastfold.evoformer.precision import set_precision  # noqa: E402
from fastfold.inference.planning.fit import available_bytes, host_memory_bytes  # noqa: E402
from fastfold.inference.planning.planner import FoldPlan, Planner, parameter_bytes  # noqa: E402
from fastfold.memory import HostBuffers, parse_bytes  # noqa: E402
from fastfold.utils.device import choose_device  # noqa: E402
from fastfold.utils.machine import process_memory  # noqa: E402

C_Z = 128


def features(residues: int, rows: int, extra: int) -> dict[str, torch.Tensor]:
    """Return random features of a monomer with four templates, and ``rows`` and ``extra`` rows in its alignments."""
    n, s, e, t = residues, rows, extra, 4
    ones, aatype = torch.ones, torch.randint(0, 20, (n,))
    positions = 10 * torch.randn(t, n, 37, 3)
    return {
        "aatype": aatype,
        "seq_mask": ones(n),
        "residue_index": torch.arange(n),
        "target_feat": torch.randn(n, 22),
        "msa_feat": torch.randn(s, n, 49),
        "msa_mask": ones(s, n),
        "extra_msa": torch.randint(0, 22, (e, n)),
        "extra_has_deletion": torch.zeros(e, n),
        "extra_deletion_value": torch.zeros(e, n),
        "extra_msa_mask": ones(e, n),
        "template_mask": ones(t),
        "template_aatype": aatype.expand(t, n).clone(),
        "template_all_atom_positions": positions,
        "template_all_atom_masks": ones(t, n, 37),
        "template_pseudo_beta": positions[:, :, 4].clone(),
        "template_pseudo_beta_mask": ones(t, n),
    }


def config_of(blocks: int) -> Any:
    """Return ``model_1_ptm`` with ``blocks`` blocks in each stack."""
    config = model_config("model_1_ptm")
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block = trunk.extra_msa_stack_num_block = blocks
    trunk.template.template_pair_stack.num_block = min(blocks, 2)
    config.model.global_config.zero_init = False
    return config


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one length, in a fresh process."""
    torch.manual_seed(0)
    n, device = options.residues[0], choose_device(options.device)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    config = config_of(options.blocks)
    unit = n * n * C_Z * dtype.itemsize
    host = HostBuffers()
    planned, module = _prepare(options, config, device, dtype, host)
    run = _stack_run if options.part == "stack" else _network_run
    rows = options.msa, options.extra_msa
    run(module, 16, rows, device, dtype)  # loads code and starts threads
    host.sent = host.returned = 0
    found = run(module, n, rows, device, dtype)
    found |= {
        "residues": n,
        "unit_bytes": unit,
        "peak_u": found["peak_bytes"] / unit,
        "seconds_per_block": found["seconds"] / options.blocks,
        "host_sent_bytes": host.sent,
        "host_returned_bytes": host.returned,
        "predicted_u": None if planned is None else planned.peak / unit,
        "chunks": None if planned is None else {name: words for name, words, _ in planned.table()},
    }
    return found


def _prepare(
    options: argparse.Namespace, config: Any, device: torch.device, dtype: torch.dtype, host: HostBuffers
) -> tuple[FoldPlan | None, torch.nn.Module]:
    """Return the plan, and the module with its policy."""
    trunk = config.model.embeddings_and_evoformer
    module: torch.nn.Module
    if options.part == "stack":
        blocks = [EvoformerBlock(trunk.evoformer, 256, C_Z, zero_init=False) for _ in range(options.blocks)]
        module = EvoformerStack(list(blocks)).to(dtype)
    else:
        module = set_precision(AlphaFold(config), options.dtype)
    module = module.to(device).eval()
    if options.plain:
        set_policy(module, ExecutionPolicy())
        return None, module
    budget = parse_bytes(options.memory_budget) if options.memory_budget else available_bytes(device)
    planner = Planner(
        config,
        dtype.itemsize,
        device.type,
        host_memory=host_memory(options, host_memory_bytes(device.type)),
        parameters=parameter_bytes(module),
        host=host,
        rows=options.msa + options.extra_msa,
        templates=0 if options.part == "stack" else None,
    )
    plan = planner.plan(options.residues[0], budget)
    if isinstance(module, AlphaFold):
        for part, policy in plan.policies(module).items():
            part.policy = policy
    else:
        set_policy(module, plan.policy, plan.blocks)
    return plan, module


def host_memory(options: argparse.Namespace, default: int) -> int:
    """Return the bytes of host memory for offloaded tensors."""
    if options.no_host:
        return 0
    return default if options.host_memory is None else parse_bytes(options.host_memory)


def _stack_run(
    module: torch.nn.Module, n: int, rows: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    kind: dict[str, Any] = {"device": device, "dtype": dtype}
    inputs = (
        torch.randn(rows[0], n, 256, **kind),
        torch.randn(n, n, C_Z, **kind),
        torch.ones(rows[0], n, **kind),
        torch.ones(n, n, **kind),
    )
    return _measure_run(lambda: module(*inputs), device)


def _network_run(
    module: torch.nn.Module, n: int, rows: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    from fastfold.evoformer.confidence import plddt, predicted_aligned_error, predicted_tm_score

    def fold() -> None:
        result = module(lambda *_: features(n, *rows), num_recycles=0)
        plddt(result["predicted_lddt"]["logits"])
        head = result["predicted_aligned_error"]
        predicted_aligned_error(head["logits"], head["breaks"])
        predicted_tm_score(head["logits"], head["breaks"])

    return _measure_run(fold, device)


def _measure_run(function: Any, device: torch.device) -> dict[str, Any]:
    """Run a function; return its seconds, and its peak in bytes above the memory at the start."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        before = process_memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    used = time.process_time()
    with torch.inference_mode():
        function()
    if cuda:
        torch.cuda.synchronize(device)
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    peak = torch.cuda.max_memory_allocated(device) if cuda else process_memory("VmHWM")
    return {"seconds": seconds, "processor_seconds": processor, "peak_bytes": peak - before}


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Fit the growth exponent of values over lengths: the slope of the line through the logarithms."""
    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def simulated(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulate the memory of a device with the budget, and of the host, at each length."""
    from benchmarks.simulation.fold import simulate

    if options.memory_budget is None:
        raise SystemExit("--simulate needs --memory-budget, because it asks no device")
    found = []
    for n in options.residues:
        unit = n * n * C_Z * (2 if options.dtype == "bf16" else 4)
        given = features(n, options.msa, options.extra_msa)
        one = simulate(
            config_of(options.blocks),
            lambda *_, given=given: dict(given),
            n,
            parse_bytes(options.memory_budget),
            rows=options.msa + options.extra_msa,
            precision=options.dtype,
            host_memory=host_memory(options, 1 << 50),
        )
        found.append(
            {
                "residues": n,
                "unit_bytes": unit,
                "simulated_bytes": one.peak,
                "planned_bytes": one.planned,
                "plan_with_driver_bytes": one.plan.peak,
                "host_bytes": one.host,
                "chunks": {name: words for name, words, _ in one.plan.table()},
            }
        )
        print(
            f"simulated network N {n:>6} {options.dtype}: {one.peak:,} bytes = {one.peak / unit:.3f} U on the device "
            f"(planned {one.planned:,}), {one.host:,} bytes on the host",
            flush=True,
        )
    return found


def machine() -> dict[str, Any]:
    """Describe the machine."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": name,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    """Measure the lengths, print them, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--residues", type=int, nargs="+", required=True)
    parser.add_argument("--blocks", type=int, default=2, help="blocks of each stack (default 2)")
    parser.add_argument("--msa", type=int, default=32, help="rows of the MSA (default 32)")
    parser.add_argument("--extra-msa", type=int, default=32, help="rows of the extra MSA (default 32)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--part", choices=("stack", "network"), default="stack")
    parser.add_argument("--memory-budget", metavar="SIZE", help="default: free memory of the device")
    host = parser.add_mutually_exclusive_group()
    host.add_argument(
        "--host-memory", metavar="SIZE", help="for offloaded tensors (default: most of the free memory)"
    )
    host.add_argument("--no-host", action="store_true", help="offload nothing")
    parser.add_argument(
        "--plain", action="store_true", help="compute without blocks and not in place, for comparison"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--simulate", action="store_true", help="count a GPU's memory without a GPU")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    found = simulated(options) if options.simulate else []
    for n in () if options.simulate else options.residues:
        arguments = sys.argv[1:]
        command = [sys.executable, __file__, *arguments, "--residues", str(n), "--one"]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(run.stdout))
        one = found[-1]
        predicted = (
            "" if one["predicted_u"] is None else f" (planned at most {one['predicted_u']:.2f} U in all)"
        )
        print(
            f"{options.part} N {n:>6} {options.dtype}: peak {one['peak_bytes'] / 2**20:,.0f} MiB = "
            f"{one['peak_u']:.2f} U"
            f"{predicted}, {one['seconds_per_block']:.1f} s per block, "
            f"{one['processor_seconds'] / options.blocks:.1f} s of processor time; 48 blocks would take "
            f"{48 * one['seconds_per_block']:,.0f} s",
            flush=True,
        )
        if one["host_sent_bytes"]:
            print(
                f"  to the host {one['host_sent_bytes']:,} bytes, back {one['host_returned_bytes']:,} bytes"
            )
    exponents = {}
    if len(found) > 1 and not options.simulate:
        for key in ("peak_bytes", "seconds", "processor_seconds"):
            exponents[key] = exponent(options.residues, [one[key] for one in found])
            print(f"{key} grow as N^{exponents[key]:.2f}")
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items() if key not in ("json", "one")}
        everything = {"machine": machine(), "settings": settings, "found": found, "exponents": exponents}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
