"""How a fold is run within a memory budget: what people set is the budget, everything else follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.inference.operator_cost import Costs
from fastfold.inference.operator_memory import (
    LARGEST_BLOCK,
    TEMPLATE_BLOCK,
    Fold,
    contractions,
    fold_sizes,
    operators,
    pair_bytes,
    row_elements,
)
from fastfold.kernels.host_tier import HostTier
from fastfold.kernels.triangle_contraction import ContractionPlan
from fastfold.memory import BudgetError
from fastfold.memory.chunking import (
    ChunkPlan,
    Operator,
    Way,
    choose_ways,
    longest_that_fits,
    smallest_that_works,
)

# Updates go into their input, and no layer holds its intermediate results for more than 16 MiB of it at once
# (float32); logits of pairs are made in blocks of rows when scores are computed from them.
FOLDING_POLICY = ExecutionPolicy(
    block_elements=LARGEST_BLOCK,
    inplace=True,
    lazy_logits=True,
    heads=("predicted_lddt", "predicted_aligned_error"),
)

_HOST = HostTier()


@dataclass(frozen=True)
class FoldPlan:
    """A way to run a fold.

    Attributes:
        chunks: What was chosen for each step.
        unit: Bytes of the pair tensor, U.
        slow_down: Expected time over that with memory without end.
        policy: For :func:`fastfold.evoformer.execution.set_policy`; :data:`FOLDING_POLICY` where everything fits.
        blocks: Its ``block_elements`` of each step; empty where everything fits.
    """

    chunks: ChunkPlan
    unit: int
    slow_down: float
    policy: ExecutionPolicy
    blocks: dict[str, int | None]

    @property
    def peak(self) -> int:
        """Most bytes at any time, as predicted."""
        return self.chunks.peak

    @property
    def streams(self) -> bool:
        """Whether products of triangle multiplications wait on the host."""
        return self.policy.contraction.host is not None

    def table(self) -> list[tuple[str, str, int]]:
        """Each step with its chunks in words and its peak in bytes."""
        rows = []
        for operator in self.chunks.operators:
            way = self.chunks.chosen[operator.name]
            words = f"{way.size:,} {operator.unit}"
            if operator.unit == "kept":
                words = "all kept" if way.size else "embedded twice"
            if way.host:
                words += ", pair on the host" if operator.unit == "kept" else ", product on the host"
            rows.append((operator.name, words, operator.resident + way.working))
        return rows


@dataclass(frozen=True)
class Planner:
    """Makes plans for one network on one device.

    Attributes:
        config: Official configuration tree.
        element_size: Bytes per element of the trunk.
        device: ``cpu`` or ``cuda``.
        costs: What the ways cost there.
        host_memory: Bytes of the host's memory for what leaves the device; 0 for none.
        parameters: Bytes of the parameters.
    """

    config: Any
    element_size: int
    device: str = "cpu"
    costs: Costs = field(default_factory=Costs)
    host_memory: int = 0
    parameters: int = 0

    def plan(
        self, residues: int, budget: int, *, rows: int | None = None, templates: int | None = None
    ) -> FoldPlan:
        """The fastest plan within a budget.

        Args:
            residues: Length of the target, all chains together.
            budget: Bytes.
            rows: Rows of all alignments; None for as many as the network takes.
            templates: Shown to the network; None for as many as it takes.

        Raises:
            BudgetError: The smallest plan needs more.
        """
        fold = self._fold(residues, rows, templates)
        plans, errors = [], []
        for found in self._alternatives(fold):
            try:
                plans.append(choose_ways(found, budget, host_budget=self.host_memory))
            except BudgetError as error:
                errors.append(error)
        if not plans:
            raise min(errors, key=lambda error: error.smallest)
        chunks = min(plans, key=lambda plan: (plan.seconds, plan.peak, plan.host))
        fastest = min(sum(min(w.seconds for w in o.ways) for o in p) for p in self._alternatives(fold))
        product: Way = chunks.chosen["triangle multiplication"]
        contraction = ContractionPlan(product.size, _HOST if product.host else None)
        templates_way = chunks.chosen.get("templates")
        held = templates_way is None or templates_way.size > 0
        parked = templates_way is not None and templates_way.host > 0
        slow_down = chunks.seconds / fastest if fastest else 1.0
        unit = pair_bytes(self.config, fold)
        largest = all(chunks.chosen[o.name].size == o.ways[0].size for o in chunks.operators)
        if largest and (product.size, product.host > 0) == contractions(self.config, host=False)[0]:
            return FoldPlan(chunks, unit, slow_down, FOLDING_POLICY, {})
        policy = replace(FOLDING_POLICY, contraction=contraction, hold_templates=held, park_pair=parked)
        row = row_elements(self.config, fold)
        blocks: dict[str, int | None] = {name: chunks.chosen[name].size * row[name] for name in row}
        return FoldPlan(chunks, unit, slow_down, policy, blocks | {"templates": TEMPLATE_BLOCK})

    def smallest(self, residues: int, *, rows: int | None = None, templates: int | None = None) -> int:
        """The smallest budget in bytes with which there is a plan."""
        fold = self._fold(residues, rows, templates)
        host = self.host_memory
        return min(smallest_that_works(found, host_budget=host) for found in self._alternatives(fold))

    def longest(self, budget: int, *, rows: int | None = None, templates: int | None = None) -> int:
        """The largest number of residues for which there is a plan within a budget."""
        return longest_that_fits(
            lambda n: self.smallest(n, rows=rows, templates=templates) if n else 0, budget
        )

    def _alternatives(self, fold: Fold) -> Iterator[list[Operator]]:
        """The steps with each of the contractions."""
        for contraction in contractions(self.config, host=self.host_memory > 0):
            found = operators(self.config, fold, self.costs, contraction)
            if all(min(way.host for way in operator.ways) <= self.host_memory for operator in found):
                yield found

    def _fold(self, residues: int, rows: int | None, templates: int | None) -> Fold:
        return fold_sizes(
            self.config,
            residues,
            element_size=self.element_size,
            alignment_rows=rows,
            templates=templates,
            parameters=self.parameters,
            device=self.device,
        )


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of a network's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
