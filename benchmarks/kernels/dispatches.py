"""Number of operators that PyTorch dispatches for a pass, a block and a structure module on a GPU: the host's work.

Usage: python -m benchmarks.kernels.dispatches [--write]

Counted on tensors of the device ``meta``, on any machine: every operator that reaches the dispatcher, with views, and
every launch of a kernel. FastFold's operators count once each if they go through the dispatcher, as where gradients are
recorded, and the operators that they call count too.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels.block import block_config
from benchmarks.kernels.cases import C_M, C_Z
from benchmarks.kernels.recording import launches_replaced
from benchmarks.long_sequence import features
from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock, EvoformerStack
from fastfold.evoformer.execution import set_policy
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import parameters_to, set_precision
from fastfold.evoformer.structure.structure_module import StructureModule
from fastfold.inference.planning.planner import FOLDING_POLICY, Planner
from fastfold.kernels.common import backend
from fastfold.kernels.common.backend import VARIABLE
from fastfold.utils.units import GIB

TABLE = Path(__file__).parent.parent / "results" / "dispatches.csv"
SHAPES = ((32, 64), (37, 100), (128, 256), (516, 256), (516, 384), (516, 1024))
"""Rows and residues of the alignment; the last ones of 512 clusters and 4 templates."""
EXTRA_SHAPES = ((1024, 256), (5120, 256), (5120, 384))
"""Rows and residues of the extra alignment of official networks."""
PLANNED_SHAPES = ((516, 256), (516, 1024), (516, 2048))
"""Rows and residues of blocks by plan."""
FORWARD, BOTH = "forward", "forward + backward"
EXTRA = "forward, extra MSA"
PLANNED = "forward, by plan"
PASS = "pass"
"""Blocks whose layers have the policies of a plan for ``BUDGET``."""
CLUSTERS = 512  #: Rows of the alignment of official networks, without templates
BUDGET = 78 * GIB  #: Bytes for the plans, of an H100 with 80 GB
C_S = 384  #: Channels of the single representation
C_E = 64  #: Channels of the extra alignment


class Count(NamedTuple):
    """Line of the table."""

    name: str
    rows: int
    residues: int
    dispatches: int
    launches: int


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if not self.paused:
            self.found[str(function)] += 1
        return function(*arguments, **(options or {}))

    @contextmanager
    def bodies_of_operators(self) -> Iterator[None]:
        """Run the bodies of operators as on a GPU; for meta tensors PyTorch would only compute shapes."""
        call = CustomOpDef.__call__

        def run(definition: CustomOpDef, *arguments: Any, **options: Any) -> Any:
            with torch.no_grad():
                result = definition._init_fn(*arguments, **options)
            self.found[definition._qualname] += 1
            if "backward" in definition._qualname:
                return result
            before, self.paused = self.paused, True
            try:
                return call(definition, *arguments, **options)  # lets autograd record the operator
            finally:
                self.paused = before

        with mock.patch.object(CustomOpDef, "__call__", run):
            yield


def _runs_directly(x: Tensor) -> bool:
    """Return True where a fold on a GPU leaves the dispatcher of custom operators out."""
    return not torch.is_grad_enabled()


def count(run: Callable[[], object]) -> tuple[Counter[str], int]:
    """Count dispatches by operator, and launches, of a function on tensors of the device ``meta``."""
    launches = 0

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            nonlocal launches
            launches += 1

        return launch

    counting = _Counting()
    with (
        mock.patch.dict("os.environ", {VARIABLE: "triton"}),
        mock.patch.object(backend, "runs_directly", _runs_directly),
        launches_replaced(launcher),
        counting.bodies_of_operators(),
        counting,
    ):
        run()
    return counting.found, launches


def of_stack(name: str, rows: int, residues: int, blocks: int = 1) -> tuple[Counter[str], int]:
    """Count blocks of bfloat16, in inference or with gradients of all inputs and parameters.

    :data:`EXTRA` are blocks of the extra MSA stack, and :data:`PLANNED` blocks as a fold runs them.
    """
    channels, is_extra = (C_E, True) if name == EXTRA else (C_M, False)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    with torch.device("meta"):
        made = [
            EvoformerBlock(block_config(), channels, C_Z, global_column=is_extra, zero_init=False)
            for _ in range(blocks)
        ]
        stack = parameters_to(EvoformerStack(made).eval(), torch.bfloat16)
    msa, pair, masks = new(rows, residues, channels), new(residues, residues, C_Z), (rows, residues)
    inputs = msa, pair, new(*masks), new(residues, residues)
    if name == PLANNED:
        plan = Planner(model_config("model_1_ptm"), 2, "cuda").plan(residues, BUDGET)
        set_policy(stack, plan.policy, plan.blocks)

    def forward() -> None:
        with torch.no_grad():
            stack(*inputs)

    def both() -> None:
        leaves = [msa.requires_grad_(), pair.requires_grad_(), *stack.parameters()]
        torch.autograd.grad(stack(*inputs), leaves, [torch.empty_like(x) for x in (msa, pair)])

    return count(both if name == BOTH else forward)


def of_structure_module(residues: int) -> tuple[Counter[str], int]:
    """Count a structure module of float32 parameters, after a trunk in bfloat16."""
    heads = model_config("model_1_ptm").model.heads
    with torch.device("meta"):
        module = StructureModule(heads.structure_module, C_S, C_Z, multimer=False, zero_init=False).eval()
        inputs = (
            torch.empty(residues, C_S, dtype=torch.bfloat16),
            torch.empty(residues, residues, C_Z, dtype=torch.bfloat16),
            torch.empty(residues, dtype=torch.int64),
            torch.empty(residues),
        )
    set_policy(module, FOLDING_POLICY)

    def forward() -> None:
        with torch.no_grad():
            module(*inputs)

    return count(forward)


def of_pass(residues: int, templates: int) -> tuple[Counter[str], int]:
    """Count a pass of ``model_1_ptm`` by plan, with the alignments of official networks and a number of templates."""
    config = model_config("model_1_ptm")
    with torch.device("meta"):
        model = set_precision(AlphaFold(config), "bf16").eval()
    alignments = features(residues, CLUSTERS, EXTRA_SHAPES[0][0])
    batch = {name: value.to("meta")[None] for name, value in alignments.items()}
    plan = Planner(config, 2, "cuda").plan(residues, BUDGET)
    set_policy(model, replace(plan.policy, templates=tuple(range(templates))), plan.blocks)

    def forward() -> None:
        with torch.no_grad():
            model(batch, 0)

    count(forward)  # the first pass also makes constants
    return count(forward)


def counts() -> list[Count]:
    """Count all blocks and shapes."""
    found = []
    shapes_of = {FORWARD: SHAPES, BOTH: SHAPES, EXTRA: EXTRA_SHAPES, PLANNED: PLANNED_SHAPES}
    for name, shapes in shapes_of.items():
        for rows, residues in shapes:
            dispatches, launches = of_stack(name, rows, residues)
            found.append(Count(name, rows, residues, sum(dispatches.values()), launches))
    (first, first_launches), (both, launches) = (of_stack(FORWARD, 37, 100, blocks) for blocks in (1, 2))
    further = sum(both.values()) - sum(first.values())
    found.append(Count("further block, forward", 37, 100, further, launches - first_launches))
    dispatches, launches = of_structure_module(100)
    return [*found, Count("structure module", 1, 100, sum(dispatches.values()), launches)]


def counts_of_passes() -> list[Count]:
    """Count passes of 100 residues, without templates and with four."""
    table = []
    for templates in (0, 4):
        dispatches, launches = of_pass(100, templates)
        table.append(
            Count(f"{PASS}, {templates} templates", CLUSTERS, 100, sum(dispatches.values()), launches)
        )
    return table


def read() -> list[Count]:
    """Read the written table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [Count(row[0], *map(int, row[1:])) for row in list(csv.reader(file))[1:]]


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} in results/")
    options = parser.parse_args()
    table = [*counts(), *counts_of_passes()]
    print(f"{'bfloat16':<23} {'MSA':>10} {'dispatches':>11} {'launches':>9}")
    for each in table:
        print(
            f"{each.name:<23} {f'{each.rows} x {each.residues}':>10} {each.dispatches:>11} {each.launches:>9}"
        )
    if options.write:
        with TABLE.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([Count._fields, *table])


if __name__ == "__main__":
    main()
