"""What no data sheet says: shares of rates, launches, latencies; and the published steps that they are checked against.

All of it is in ``calibration.json``, which says of each constant whether it was fitted, and to what, or assumed.
``tests/parallel/planner/test_published_steps.py`` holds the model to the published steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from fastfold.parallel.plan import ParallelPlan

PublishedKind = Literal["block_forward", "block_backward", "step", "flops_per_second", "training"]


@dataclass(frozen=True)
class Assumptions:
    """What no table says. Shares are of tabulated rates; measured ones are taken as they are.

    Attributes:
        matrix_share: Of the matrix rate, in the products of a network.
        attention_share: Of the matrix rate, in the products of a fused attention.
        bandwidth_share: Of the memory's bandwidth.
        link_share: Of links and network.
        launch_seconds: That the host takes to launch a kernel, which takes no less than that; or a whole graph.
        kernel_seconds: That a kernel takes on the device in addition to its work.
        latency_seconds: For a message to arrive, in addition to its bytes.
        memory_share: Of a GPU's memory that a plan may fill: fragments and the libraries need the rest.
        hidden_share: Of the communication inside the model that overlaps with computation.
        imbalance: Time of the slowest rank by that of the mean, for which all others wait; 1 for none.
        additive: Share of the shorter of an operator's products and memory traffic that adds to the longer one.
        score_instructions: Instructions of a softmax for each score.
        hidden_synchronisation: Share of the computation beside which gradients and parameters are sent.
        sources: Where each of them is from, by its name.
        graphed: Whether each block's kernels are launched as one CUDA graph.
    """

    matrix_share: float
    attention_share: float
    bandwidth_share: float
    link_share: float
    launch_seconds: float
    kernel_seconds: float
    latency_seconds: float
    memory_share: float
    hidden_share: float
    imbalance: float
    additive: float
    score_instructions: float
    hidden_synchronisation: float
    sources: Mapping[str, str] = field(compare=False, repr=False)
    graphed: bool = False


@dataclass(frozen=True)
class Published:
    """A time or a rate that somebody has published.

    Attributes:
        name: What was run.
        what: What :attr:`value` is: seconds of a block's pass, of a step, or of a whole training of ``samples``
            samples; or FLOP/s of all GPUs together.
        value: See above.
        gpu: Name of the accelerator.
        source: Where it is published, and what of the settings is not.
        plan: How it was split, a sample for each rank of ``dp``.
        sizes: ``residues``, ``msa`` and ``extra_msa``.
        checkpointing: Whether blocks were computed again in the backward pass.
        graphed: Whether kernels were launched as CUDA graphs.
        per_machine: GPUs of a machine, where it is not the table's.
        samples: Of a whole training.
    """

    name: str
    what: PublishedKind
    value: float
    gpu: str
    source: str
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    sizes: Mapping[str, int] = field(default_factory=lambda: {"residues": 256, "msa": 128, "extra_msa": 1024})
    checkpointing: bool = False
    graphed: bool = False
    per_machine: int | None = None
    samples: int | None = None


def _read() -> dict[str, Any]:
    path = resources.files("fastfold.parallel.planner") / "calibration.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _constants(table: Mapping[str, Mapping[str, Any]]) -> Assumptions:
    sources = {name: row["source"] for name, row in table.items()}
    return Assumptions(**{name: row["value"] for name, row in table.items()}, sources=sources)


def _published(row: Mapping[str, Any]) -> Published:
    return Published(**(dict(row) | {"plan": ParallelPlan(**row.get("plan", {}))}))


_TABLE = _read()

TRAINING = _constants(_TABLE["training"])
"""Of training steps, fitted to :data:`PUBLISHED`."""
GENERAL = _constants(_TABLE["general"])
"""Of training steps of models in general; ``benchmarks/published_models.py`` compares them."""
FOLDING = _constants(_TABLE["folding"])
"""Of long folds; assumed."""
PUBLISHED = tuple(_published(row) for row in _TABLE["published"])
"""What the training's constants are checked against."""
LEFT_OUT: tuple[tuple[str, str], ...] = tuple((row["what"], row["why"]) for row in _TABLE["left_out"])
"""What else is published, and why nothing is checked against it."""
WITHIN: float = _TABLE["within"]
"""The model gives everything in :data:`PUBLISHED` within this factor."""
