"""Cost model against published steps on A100 and H100.

The published values, with their sources, are in ``fastfold/parallel/planner/calibration.json``. They are of other
programs: the model counts the operators of this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal

from fastfold.evoformer.config import model_config
from fastfold.parallel import ParallelPlan
from fastfold.parallel.alphafold.workload import alphafold_workload
from fastfold.parallel.planner.cost_model import compute_seconds, step_cost
from fastfold.parallel.planner.hardware import TRAINING, WITHIN, Assumptions, Rates, rates
from fastfold.parallel.planner.search import seconds_text
from fastfold.parallel.planner.workload import Workload

_BLOCK = "evoformer.blocks.0"

PublishedKind = Literal["block_forward", "block_backward", "step", "flops_per_second", "training"]


@dataclass(frozen=True)
class Published:
    """A published time or rate."""

    name: str  #: Name of the run
    #: Kind of :attr:`value`: seconds of a block's pass, of a step, or of a whole training of ``samples`` samples; or
    #: FLOP/s of all GPUs together
    what: PublishedKind
    value: float  #: The time or rate
    gpu: str  #: Name of the accelerator
    source: str  #: Publication, and settings that it leaves open
    #: Plan of the run, with one sample for each rank of ``dp``
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    #: ``residues``, ``msa`` and ``extra_msa``
    sizes: Mapping[str, int] = field(default_factory=lambda: {"residues": 256, "msa": 128, "extra_msa": 1024})
    checkpointing: bool = False  #: True if blocks were recomputed in the backward pass
    graphed: bool = False  #: True if kernels were launched as CUDA graphs
    per_machine: int | None = None  #: GPUs of a machine, if they differ from the table
    samples: int | None = None  #: Samples of a whole training


_FILE = resources.files("fastfold.parallel.planner") / "calibration.json"
_TABLE: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))

PUBLISHED = tuple(
    Published(**(row | {"plan": ParallelPlan(**row.get("plan", {}))})) for row in _TABLE["published"]
)
"""Published values that check the training's constants."""
LEFT_OUT: tuple[tuple[str, str], ...] = tuple((row["what"], row["why"]) for row in _TABLE["left_out"])
"""Published values that nothing is checked against, each with the reason."""


class PublishedSteps:
    """Predictions of published values, which share traces."""

    def __init__(self) -> None:
        self._workloads: dict[tuple[tuple[str, int], ...], Workload] = {}

    def predict(self, published: Published, constants: Assumptions = TRAINING) -> float:
        """Return the cost model's prediction of a published value, in its unit.

        Args:
            published: Published value.
            constants: Constants of the model.
        """
        speeds = _rates(published, constants)
        workload = self._workload(published)
        if published.what in ("block_forward", "block_backward"):
            region = workload.trace(ParallelPlan()).regions[_BLOCK]
            part = region.forward if published.what == "block_forward" else region.backward
            return compute_seconds(part, speeds)
        of_plan = replace(workload, samples=published.plan.dp)
        cost = step_cost(of_plan, published.plan, speeds, checkpointing=published.checkpointing)
        if published.what == "flops_per_second":
            return cost.model_flops / cost.seconds
        if published.what == "training":
            assert published.samples is not None
            return cost.seconds * -(-published.samples // of_plan.samples)
        return cost.seconds

    def _workload(self, published: Published) -> Workload:
        key = tuple(sorted(published.sizes.items()))
        if key not in self._workloads:
            self._workloads[key] = alphafold_workload(
                model_config("model_1"), name="model_1", **published.sizes
            )
        return self._workloads[key]


def _rates(published: Published, constants: Assumptions) -> Rates:
    found = rates(published.gpu, replace(constants, graphed=published.graphed))
    if published.per_machine is None:
        return found
    return replace(found, sheet=replace(found.sheet, per_machine=published.per_machine))


def published_rows() -> list[dict[str, Any]]:
    """Return every published value with the model's prediction."""
    steps = PublishedSteps()
    return [
        {
            "name": published.name,
            "what": published.what,
            "gpu": published.gpu,
            "plan": str(published.plan),
            "published": published.value,
            "model": steps.predict(published),
            "source": published.source,
        }
        for published in PUBLISHED
    ]


def published_table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as Markdown, with their sources and the values left out."""
    lines = ["| | GPU | plan | published | model | model / published |", "|---|---|---|---|---|---|"]
    for row in rows:
        value, model = (_value(row["what"], row[name]) for name in ("published", "model"))
        ratio = row["model"] / row["published"]
        lines.append(f"| {row['name']} | {row['gpu']} | {row['plan']} | {value} | {model} | {ratio:.2f} |")
    sources = [f"* {row['name']}: {row['source']}." for row in rows]
    left_out = [f"* {what}: {why}." for what, why in LEFT_OUT]
    return "\n".join(
        [*lines, "", f"All have to be within {WITHIN:g} times.", "", *sources, "", "Left out:", "", *left_out]
    )


def _value(what: str, value: float) -> str:
    if what == "flops_per_second":
        return f"{value / 1e15:.2f} PFLOP/s"
    return f"{value / 3600:.1f} h" if what == "training" else seconds_text(value)
