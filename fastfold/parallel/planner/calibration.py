"""Constants that data sheets lack (shares of rates, launches, latencies), and published steps to check them.

They are in ``calibration.json``, which says of each constant whether it was fitted, and to which data, or assumed.
``tests/parallel/planner/test_published_steps.py`` checks the model against the published steps.
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
    """Constants that data sheets lack. Shares apply to tabulated rates; measured rates are used unchanged."""

    matrix_share: float  #: Share of the matrix rate in the products of a network
    attention_share: float  #: Share of the matrix rate in the products of a fused attention
    bandwidth_share: float  #: Share of the memory's bandwidth
    link_share: float  #: Share of links and network
    #: Seconds in which the host launches a kernel or a whole graph: the minimum time of either
    launch_seconds: float
    kernel_seconds: float  #: Seconds of a kernel on the device in addition to its work
    latency_seconds: float  #: Seconds until a message arrives, in addition to its bytes
    #: Share of a GPU's memory that a plan may fill; the rest is for fragmentation and libraries
    memory_share: float
    hidden_share: float  #: Share of the communication inside the model that overlaps with computation
    imbalance: float  #: Time of the slowest rank divided by the mean; 1 for none
    #: Share of the shorter of an operator's products and memory traffic that adds to the longer one
    additive: float
    score_instructions: float  #: Instructions of a softmax for each score
    #: Share of the computation that overlaps with messages of gradients and parameters
    hidden_synchronisation: float
    sources: Mapping[str, str] = field(compare=False, repr=False)  #: Source of each constant, by its name
    graphed: bool = False  #: True if each block's kernels are launched as one CUDA graph


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


def _constants(table: Mapping[str, Mapping[str, Any]]) -> Assumptions:
    sources = {name: row["source"] for name, row in table.items()}
    return Assumptions(**{name: row["value"] for name, row in table.items()}, sources=sources)


_FILE = resources.files("fastfold.parallel.planner") / "calibration.json"
_TABLE: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))

TRAINING = _constants(_TABLE["training"])  #: Constants of training steps, fitted to :data:`PUBLISHED`
GENERAL = _constants(_TABLE["general"])
"""Constants of training steps of general models; ``benchmarks/published_models.py`` checks them."""
FOLDING = _constants(_TABLE["folding"])  #: Constants of long folds; assumed
PUBLISHED = tuple(
    Published(**(row | {"plan": ParallelPlan(**row.get("plan", {}))})) for row in _TABLE["published"]
)
"""Published values that check the training's constants."""
LEFT_OUT: tuple[tuple[str, str], ...] = tuple((row["what"], row["why"]) for row in _TABLE["left_out"])
"""Published values that nothing is checked against, each with the reason."""
WITHIN: float = _TABLE["within"]  #: Factor within which the model predicts every value of :data:`PUBLISHED`
