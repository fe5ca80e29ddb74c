"""``fastfold plan``: predicted memory of a fold and its plan, here or on GPUs that are not available.

On the latter, an operator takes the longer of its operations over a share of the data sheet's rate, and its bytes over
a share of the bandwidth. Copies to the host overlap the contractions; messages are added.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from ml_collections import ConfigDict
from torch import nn

from fastfold.errors import spelled
from fastfold.evoformer.config import is_multimer, model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import element_size
from fastfold.inference.planning.fit import host_memory_bytes, plan_target
from fastfold.inference.planning.memory_model import FIXED_CUDA, Fold, nccl_bytes, template_copies
from fastfold.inference.planning.options import PlanOptions
from fastfold.inference.planning.planner import FoldPlan, Planner
from fastfold.inference.planning.time_model import Costs, measure_costs, template_channels
from fastfold.memory import parse_bytes
from fastfold.memory.offload import kept_rows
from fastfold.parallel.axial.matmul import choose_contraction
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.cost_model import exchange_seconds
from fastfold.parallel.planner.hardware import FOLDING, Rates, rates
from fastfold.parallel.planner.search import assumptions_text
from fastfold.utils.device import choose_device
from fastfold.utils.units import GIB, clock

LAUNCHES = 20  #: Kernels per block of rows, on average over the steps
DISK = 5e9  #: Default bandwidth of the disk in bytes per second: an NVMe disk of PCIe Gen4, a part of 7 GB/s
_MESSAGES = 24
# Messages of one block: gathers, reshards in four blocks of channels, blocks of two products.


def fold_costs(rates: Rates, element_size: int) -> Costs:
    """Estimate the costs of candidates on a GPU from its rates and the bytes per element of the trunk."""
    launch = rates.assumptions.launch_seconds
    return Costs(
        rate=rates.matrix["bfloat16" if element_size == 2 else "float32"],
        per_block=LAUNCHES * launch,
        per_pair=128 * element_size / rates.bandwidth,  # each group reads the pair again
        bandwidth=rates.host_link,
        disk=DISK,
        memory=rates.bandwidth,
    )


@dataclass(frozen=True)
class FoldTime:
    """Estimated seconds of all passes of a fold; bytes ``copied`` by each GPU both ways, and ``sent`` to others."""

    computing: float
    sending: float
    copied: int
    sent: float

    @property
    def seconds(self) -> float:
        """Total seconds of the fold."""
        return self.computing + self.sending


def fold_time(config: ConfigDict, fold: Fold, plan: FoldPlan, rates: Rates, passes: int) -> FoldTime:
    """Estimate time and traffic of a fold by its plan, without aligned errors and messages of templates."""
    c = config.model.embeddings_and_evoformer
    sending = sent = 0.0
    if fold.ranks > 1:
        layout = ParallelPlan(dap=fold.ranks)
        for blocks, rows, channels in (
            (c.evoformer_num_block, fold.clusters + fold.templates, c.msa_channel),
            (c.extra_msa_stack_num_block, fold.extra, c.extra_msa_channel),
        ):
            elements = inference_elements(fold.ranks, fold.residues, rows, c_m=channels, c_z=c.pair_channel)
            own = elements * fold.element_size
            one = exchange_seconds(Communication("all_gather", "dap", fold.ranks, own), layout, rates)
            sending += blocks * (one + _MESSAGES * rates.assumptions.latency_seconds)
            sent += blocks * own
    copied = copied_bytes(config, fold, plan)
    return FoldTime(passes * plan.chunks.seconds, passes * sending, passes * copied, passes * sent)


def inference_elements(ranks: int, residues: int, sequences: int, *, c_m: int = 256, c_z: int = 128) -> float:
    """Compute the elements that a rank sends in a block's forward pass without gradients, on average over the ranks.

    It counts gathers of three biases, the left projection of the outer product mean, four reshards, and both triangle
    products in the cheaper way (:func:`fastfold.parallel.axial.matmul.choose_contraction`). ``sequences`` are rows of
    the MSA. Row attention has eight heads, triangle attention four.
    """
    n, area = residues, residues * residues
    way = choose_contraction("auto", n, n, n, c_z, ranks)
    products = 2 * c_z * area * (3 / ranks if way == "channels" else 1)
    gathered = (8 + 2 * 4) * area + 32 * sequences * n
    resharded = 2 * (c_z * area + c_m * sequences * n) / ranks
    return (ranks - 1) / ranks * (gathered + resharded + products)


def copied_bytes(config: ConfigDict, fold: Fold, plan: FoldPlan) -> int:
    """Return the bytes that one pass copies between a device and host or disk, both ways together."""
    c = config.model.embeddings_and_evoformer
    stack = c.template.template_pair_stack if c.template.enabled else None
    n, e, own = fold.residues, fold.element_size, fold.own

    def product(channels: int, kept: float) -> int:
        away = (n - kept_rows(n, kept)) * own + (own - kept_rows(own, kept)) * n
        return away * channels * e

    chosen = plan.chunks.chosen
    kept = chosen["triangle multiplication"].settings["kept"]
    hidden = c.evoformer.triangle_multiplication_outgoing.num_intermediate_channel
    blocks = c.evoformer_num_block + c.extra_msa_stack_num_block
    copied = 2 * blocks * product(hidden, kept)
    embedding = chosen.get("templates")
    if embedding is None or stack is None:
        return copied
    times = fold.templates * (1 if embedding.size or fold.templates == 1 else 2)
    copied += 2 * times * stack.num_block * product(template_channels(config), embedding.settings["product"])
    away = (own - kept_rows(own, embedding.settings["pair"])) * n * c.pair_channel * e
    return copied + template_copies(fold.templates, multimer=is_multimer(config)) * away


def report_fold_plan(options: PlanOptions, memory_budget: str) -> str:
    """Report the plan of a fold within a memory budget, or raise ConfigError or InputError."""
    device = choose_device(options.device)
    size = element_size(options.precision)
    config = model_config(options.model)
    rows = options.msa + options.extra_msa
    host = host_memory_bytes(device.type) if options.host_memory is None else _amount(options.host_memory)
    planner = Planner(
        config,
        size,
        device.type,
        costs=measure_costs(device, torch.bfloat16 if size == 2 else torch.float32),
        host_memory=host,
        disk=_amount(options.disk),
        parameters=count_parameters(config) * size,
        rows=rows,
        templates=options.templates,
    )
    budget = parse_bytes(memory_budget)
    plan = plan_target(planner, options.residues, budget)
    fits = f"longest that fits   {planner.longest(budget):,} residues"
    if size > 2:
        half = replace(planner, element_size=2, parameters=planner.parameters // 2)
        fits += f"; {half.longest(budget):,} with bf16"
    what = (
        f"{options.model}, {options.residues:,} residues, {rows:,} alignment rows, {options.precision}, on "
        f"{device.type} with {budget / GIB:,.2f} GiB (U, the pair tensor: {plan.unit / GIB:,.3f} GiB)"
    )
    lines = [what, "", *plan_lines(plan), ""]
    lines.append(f"predicted peak      {plan.peak / GIB:,.2f} GiB, {plan.peak / plan.unit:.2f} U")
    for place, nbytes in (("host", plan.chunks.host), ("disk", plan.chunks.disk)):
        if nbytes:
            lines.append(f"on the {place}         {nbytes / GIB:,.2f} GiB")
    lines.append(f"expected slow-down  {plan.slow_down:.2f} times the time without a memory limit")
    return "\n".join([*lines, fits])


def _amount(text: str | None) -> int:
    return 0 if text is None else parse_bytes(text, none=True)


def plan_lines(plan: FoldPlan) -> list[str]:
    """Format each step with its blocks and its peak as a table."""
    rows = [
        (name, chunks, f"{peak / GIB:.2f}", f"{peak / plan.unit:.2f}") for name, chunks, peak in plan.table()
    ]
    width = max(34, *(len(row[1]) + 2 for row in rows))
    return [
        f"{name:<26}{chunks:<{width}}{peak:>9}{in_units:>8}"
        for name, chunks, peak, in_units in [("step", "chunks", "peak GiB", "peak U"), *rows]
    ]


def count_parameters(config: ConfigDict) -> int:
    """Count the parameters of a network from one block of each stack."""
    trunk = config.model.embeddings_and_evoformer
    blocks, extra = trunk.evoformer_num_block, trunk.extra_msa_stack_num_block
    small = copy.deepcopy(config)
    small.model.embeddings_and_evoformer.evoformer_num_block = 1
    small.model.embeddings_and_evoformer.extra_msa_stack_num_block = 1
    with torch.device("meta"):
        model = AlphaFold(small)

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    return count(model) + (blocks - 1) * count(model.evoformer) + (extra - 1) * count(model.extra_msa_stack)


@dataclass(frozen=True)
class GpuFold:
    """Planned fold on GPUs with their bytes and rates, and its estimated time for a number of passes."""

    plan: FoldPlan
    time: FoldTime
    planner: Planner
    budget: int
    speeds: Rates
    passes: int


def plan_on_gpus(
    config: ConfigDict,
    residues: int,
    speeds: Rates,
    *,
    gpus: int = 1,
    budget: int | None = None,
    host_memory: int = 0,
    disk: int = 0,
    rows: int | None = None,
    templates: int | None = None,
    precision: str = "bf16",
    recycles: int = 3,
) -> GpuFold:
    """Plan a fold on GPUs that need not be available; other arguments and errors are those of :func:`.fit_target`.

    The budget is by default the data sheet's memory. Bytes of each machine's memory and disk for offloaded tensors are
    divided evenly among its GPUs. The precision is ``bf16`` or ``fp32``.
    """
    size = element_size(precision)
    here = min(gpus, speeds.sheet.per_machine)
    planner = Planner(
        config,
        size,
        "cuda",
        costs=fold_costs(speeds, size),
        host_memory=host_memory // here,
        parameters=count_parameters(config) * size,
        disk=disk // here,
        ranks=gpus,
        rows=rows,
        templates=templates,
    )
    budget = int(speeds.sheet.memory) if budget is None else budget
    plan = plan_target(planner, residues, budget)
    time = fold_time(config, planner.fold(residues), plan, speeds, recycles + 1)
    return GpuFold(plan, time, planner, budget, speeds, recycles + 1)


def report_gpu_plan(options: PlanOptions, gpu: str) -> str:
    """Report the plan of a fold on GPUs; errors as those of :func:`.report_fold_plan`."""
    gpus = 1 if options.gpus is None else options.gpus
    rows = options.msa + options.extra_msa
    estimate = plan_on_gpus(
        model_config(options.model),
        options.residues,
        rates(gpu, FOLDING, options.measured),
        gpus=gpus,
        budget=None if options.memory_budget is None else parse_bytes(options.memory_budget),
        host_memory=_amount(options.host_memory),  # the machine is another one
        disk=_amount(options.disk),
        rows=rows,
        templates=options.templates,
        precision=options.precision,
        recycles=options.num_recycles,
    )
    plan, time, speeds, planner = estimate.plan, estimate.time, estimate.speeds, estimate.planner
    shared = f" ({spelled(f'`parallel=dap={gpus}`')})"
    spread = f"{gpus} x {speeds.sheet.name}{shared}" if gpus > 1 else speeds.sheet.name
    longest = planner.longest(estimate.budget)
    fixed = FIXED_CUDA + nccl_bytes(gpus)
    lines = [
        f"{options.model}, {options.residues:,} residues, {rows:,} alignment rows, {options.precision}, "
        f"{estimate.passes} passes, on {spread} with {estimate.budget / GIB:,.2f} GiB each "
        f"(U, the pair tensor: {plan.unit / GIB:,.3f} GiB)",
        "",
        *plan_lines(plan),
        "",
        f"memory per GPU      {plan.peak / GIB:,.2f} GiB, {plan.peak / plan.unit:.2f} U",
        f"on the host         {plan.chunks.host / GIB:,.2f} GiB per GPU, of {planner.host_memory / GIB:,.2f} GiB",
        f"on the disk         {plan.chunks.disk / GIB:,.2f} GiB per GPU, of {planner.disk / GIB:,.2f} GiB",
        f"over PCIe           {time.copied / 1e9:,.0f} GB per GPU, both ways together",
        f"between GPUs        {time.sent / 1e9:,.0f} GB sent by each",
        f"time                {time.seconds / 3600:,.2f} hours ({clock(time.seconds)}; {speeds.calibration}): "
        f"{time.computing / 3600:,.2f} computing and copying, {time.sending / 3600:,.2f} waiting for messages",
        f"longest that fits   {longest:,} residues",
        "",
        assumptions_text(speeds, training=False),
        f"assumptions: {LAUNCHES} kernels per block of rows; copies to the host overlap the contraction of a "
        f"triangle multiplication; a disk of {DISK / 1e9:g} GB/s; {fixed / GIB:.2f} GiB of each GPU are the driver's, "
        "the libraries' and NCCL's; the machine's memory and disk are divided evenly among its GPUs; not included: "
        "the search, features, templates' messages, and writing the results",
    ]
    return "\n".join(lines)
