"""A training step to be planned: a model, its inputs, and the ways to split it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh, trace
from fastfold.parallel.planner.recorder import Trace

Layouts = Callable[[int], Iterator[ParallelPlan]]
"""Plans that split one sample over a number of ranks, by ``sp``, ``dap`` and ``tp`` only."""


@dataclass(frozen=True)
class Repeat:
    """Number of repetitions of a traced module in the real model."""

    count: int  #: Number of repetitions
    #: True for layers with their own parameters, which activation checkpointing recomputes and pipeline stages share.
    #: False for one layer that is called ``count`` times.
    layers: bool = True


@dataclass(frozen=True)
class Workload:
    """One training step to be planned."""

    name: str  #: Shown in tables
    #: Makes this rank's model with one block in each of ``stacks``, on parameters without data
    build: Callable[[ParallelMesh], nn.Module]
    #: Runs that model forward on dummy inputs (of one sample, or of ``rows``) and returns a scalar
    loss: Callable[[nn.Module], Tensor]
    samples: int  #: Samples of a step, over all ranks
    #: Names of modules (as in ``named_modules`` of the built model) that the real model repeats. Pipeline stages pass
    #: on the result of the first.
    stacks: Mapping[str, Repeat]
    layouts: Layouts  #: See :data:`Layouts`
    #: Number of samples that ``loss`` runs at once under a layout: one, unless ranks of the layout split them
    rows: Callable[[ParallelPlan], int] = lambda _: 1
    stages: int = 1  #: Maximum number of pipeline stages; 1 if the model cannot be cut
    zero: Sequence[int] = (0, 1, 2, 3)  #: ZeRO stages that may be used
    #: Mean number of forward passes without gradients before the one with gradients (recycling)
    passes: float = 0.0
    sharded_bytes: int = 8  #: Bytes per parameter that ZeRO shards from stage 1 on (Adam's moments: 8)
    #: Bytes per parameter that every replica keeps in addition to the parameter and its gradient (averages)
    copied_bytes: int = 0
    parameter_bytes: int = 4  #: Bytes of a parameter
    #: True if parameters have neither gradients nor an optimizer, because only inputs get gradients
    frozen: bool = False
    recomputed: bool = False  #: True if the model of ``build`` recomputes its blocks in the backward pass
    tied_bytes: int = 0  #: Bytes of parameters that several pipeline stages share
    small: bool = False  #: See :func:`fastfold.parallel.planner.fake_run.trace`
    description: str = ""  #: Description of the inputs for a reader
    settings: Sequence[str] = ()  #: Further Hydra overrides of this workload
    _traces: dict[ParallelPlan, Trace] = field(default_factory=dict, repr=False, compare=False)

    def repeat(self, region: str) -> Repeat:
        """Return the repetitions in the real model of a region of the trace."""
        return self.stacks.get(region, Repeat(1, layers=False))

    def plans(self, ranks: int) -> Iterator[ParallelPlan]:
        """Yield every plan of exactly this number of ranks that the workload allows.

        Every replica has at least one sample. ZeRO's stages 2 and 3 are not combined with pipeline stages, which sum
        the gradients of their micro-batches.
        """
        for inner in divisors(ranks):
            for layout in self.layouts(inner):
                for pp in divisors(ranks // inner):
                    dp = ranks // inner // pp
                    if dp * self.rows(layout) > self.samples or pp > self.stages:
                        continue
                    plan = replace(layout, dp=dp, pp=pp)
                    for zero in self.zero if plan.replicas > 1 else (0,):
                        if pp == 1 or zero < 2:
                            yield replace(plan, zero=zero)

    @property
    def traced(self) -> Mapping[ParallelPlan, Trace]:
        """Traces recorded so far, by layout."""
        return self._traces

    def trace(self, layout: ParallelPlan) -> Trace:
        """Trace a micro-batch on rank 0 of a layout, which has the longest shards; cached."""
        if layout not in self._traces:
            with fake_mesh(layout) as mesh:
                self._traces[layout] = trace(
                    self.build, self.loss, mesh, regions=tuple(self.stacks), small=self.small
                )
        return self._traces[layout]


def divisors(number: int) -> list[int]:
    """Return all divisors, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def standard_layouts(
    *, dap: int = 1, sp: int = 1, tp: int = 1, tp_modes: Sequence[str] = ("1d",), grid: bool = False
) -> Layouts:
    """Return a function that yields every way to split one sample over n ranks.

    The arguments are maximum sizes of groups, and the modes to try. With ``grid``, the pair tensor is also tried on a
    grid, as square as the number of ranks allows.
    """

    def layouts(ranks: int) -> Iterator[ParallelPlan]:
        for d in divisors(ranks):
            for s in divisors(ranks // d):
                t = ranks // d // s
                if d > dap or s > sp or t > tp:
                    continue
                for dap_choice in _dap_choices(d, grid):
                    for tp_choice in _tp_choices(t, tp_modes):
                        yield ParallelPlan(sp=s, **dap_choice, **tp_choice)

    return layouts


def _dap_choices(ranks: int, grid: bool) -> Iterator[dict[str, Any]]:
    yield {"dap": ranks}
    if grid and ranks > 1:
        rows = max(n for n in divisors(ranks) if n * n <= ranks)
        # A square grid needs no number of rows; a grid of one row or column is plain DAP.
        if rows * rows == ranks:
            yield {"dap": ranks, "dap_mode": "grid"}
        elif rows > 1:
            yield {"dap": ranks, "dap_mode": "grid", "dap_rows": rows}


def _tp_choices(ranks: int, modes: Sequence[str]) -> Iterator[dict[str, Any]]:
    if ranks == 1:
        yield {}
        return
    for mode in modes:
        for depth in divisors(ranks)[1:] if mode == "2.5d" else [1]:
            choice: dict[str, Any] = {"tp": ranks, "tp_mode": mode, "tp_depth": depth}
            try:
                side = ParallelPlan(**choice).tp_grid[-1]
            except ConfigError:  # this number of ranks makes no such grid
                continue
            if mode != "2.5d" or side > 1:
                yield choice
