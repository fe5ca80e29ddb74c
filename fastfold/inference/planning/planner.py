"""How a fold is run within a memory budget: what people set is the budget, everything else follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from fastfold.evoformer.execution import ExecutionPolicy, set_policy
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.planning.memory_model import (
    MAX_BLOCK,
    TEMPLATE_BLOCK,
    Fold,
    fold_sizes,
    operators,
    pair_bytes,
    row_elements,
)
from fastfold.inference.planning.offload_room import OffloadRoom
from fastfold.inference.planning.time_model import Costs
from fastfold.kernels.ops.triangle_multiplication.contraction import ContractionPlan
from fastfold.memory import HostBuffers
from fastfold.memory.block_sizes import (
    BlockPlan,
    Operator,
    choose_candidates,
    longest_that_fits,
    smallest_that_works,
)

# Updates go into their input, and no layer holds its intermediate results for more than 16 MiB of it at once
# (float32); logits of pairs are made in blocks of rows when scores are computed from them.
FOLDING_POLICY = ExecutionPolicy(
    block_elements=MAX_BLOCK,
    inplace=True,
    lazy_logits=True,
    heads=("predicted_lddt", "predicted_aligned_error"),
)


@dataclass(frozen=True)
class FoldRequest:
    """What a plan was asked for: equal requests give equal plans, in every process.

    Attributes:
        planner: The attributes of a :class:`Planner` but for ``host``.
        residues: Length of the target, all chains together.
        budget: Bytes.
        rows: Rows of all alignments; None for as many as the network takes.
        templates: Shown to the network; None for as many as it takes.
    """

    planner: Mapping[str, Any]
    residues: int
    budget: int
    rows: int | None
    templates: int | None

    def plan(self, host: HostBuffers) -> FoldPlan:
        """The plan.

        Args:
            host: Holds what leaves the device here.

        Raises:
            BudgetError: There is none.
        """
        planner = Planner(host=host, **self.planner)
        return planner.plan(self.residues, self.budget, rows=self.rows, templates=self.templates)


@dataclass(frozen=True)
class FoldPlan:
    """A way to run a fold.

    Attributes:
        chunks: What was chosen for each step.
        unit: Bytes of the pair tensor, U.
        slow_down: Expected time over that with memory without end.
        policy: The network's; :data:`FOLDING_POLICY` where everything fits.
        blocks: Its ``block_elements`` of each step; empty where everything fits.
        templates: The contraction of the templates' own pair stacks.
        request: What it was asked for.
    """

    chunks: BlockPlan
    unit: int
    slow_down: float
    policy: ExecutionPolicy
    blocks: dict[str, int | None]
    templates: ContractionPlan
    request: FoldRequest

    def apply(self, model: AlphaFold) -> None:
        """Let a network run by the plan."""
        host = self.policy.contraction.host or self.policy.offload or self.templates.host
        if host is not None:
            host.expected = self.chunks.host
            if host.overflow is not None:
                host.overflow.expected = self.chunks.disk
        set_policy(model, self.policy, self.blocks)
        if model.template_embedder is not None:
            stack = model.template_embedder.get_submodule("stack")
            set_policy(stack, replace(self.policy, contraction=self.templates), self.blocks)

    @property
    def peak(self) -> int:
        """Most bytes at any time, as predicted."""
        return self.chunks.peak

    @property
    def streams(self) -> bool:
        """Whether products of triangle multiplications wait on the host, or a part of them."""
        return self.policy.contraction.host is not None

    def table(self) -> list[tuple[str, str, int]]:
        """Each step with its chunks in words and its peak in bytes."""
        rows = []
        for operator in self.chunks.operators:
            candidate = self.chunks.chosen[operator.name]
            words = f"{candidate.size:,} {operator.unit}"
            if operator.unit == "kept":
                words = "all kept" if candidate.size else "embedded twice"
            for key, what in (("pair", "pair"), ("product", "product"), ("kept", "product")):
                away = 1.0 - candidate.settings.get(key, 1.0)
                if away:
                    words += f", {what if away == 1.0 else f'{away:.0%} of the {what}'} on the host"
            rows.append((operator.name, words, operator.resident + candidate.working))
        return rows


@dataclass(frozen=True)
class Planner:
    """Makes plans for one network on one device.

    Attributes:
        config: Official configuration tree.
        element_size: Bytes per element of the trunk.
        device: ``cpu`` or ``cuda``.
        costs: What the candidates cost there.
        host_memory: Bytes of the host's memory for what leaves the device; 0 for none.
        parameters: Bytes of the parameters.
        host: Holds what leaves the device.
        disk: Bytes of a disk for what leaves the device and finds no room in the host's memory.
        ranks: How many processes share the target, each with a device like this one and this much of the host.
        cuda_graph: Whether passes are replayed from a CUDA graph.
    """

    config: Any
    element_size: int
    device: str = "cpu"
    costs: Costs = field(default_factory=Costs)
    host_memory: int = 0
    parameters: int = 0
    host: HostBuffers = field(default_factory=HostBuffers)
    disk: int = 0
    ranks: int = 1
    cuda_graph: bool = False

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
        fold = self.fold(residues, rows, templates)
        chunks = choose_candidates(self._operators(fold), budget, host_budget=self.host_memory)
        chosen, unit = chunks.chosen, pair_bytes(self.config, fold)
        everything = FOLDING_POLICY
        if self.device != "cpu":
            everything = replace(everything, block_elements=fold.max_block)
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "host"}
        request = FoldRequest(own, residues, budget, rows, templates)
        if all(chosen[o.name] == o.candidates[0] for o in chunks.operators):
            return FoldPlan(chunks, unit, 1.0, everything, {}, everything.contraction, request)

        def contraction(channels: int, kept: float) -> ContractionPlan:
            return ContractionPlan(channels, self.host, kept) if kept < 1.0 else ContractionPlan(channels)

        product, embedding = chosen["triangle multiplication"], chosen.get("templates")
        policy = replace(everything, contraction=contraction(product.size, product.settings["kept"]))
        if "exchange" in chosen:
            policy = replace(policy, reshard_blocks=chosen["exchange"].size)
        of_templates = policy.contraction
        if embedding is not None:
            kept = embedding.settings["pair"]
            policy = replace(
                policy,
                hold_templates=embedding.size > 0,
                offload=self.host if kept < 1.0 else None,
                offload_kept=kept if kept < 1.0 else 0.0,
            )
            of_templates = contraction(embedding.settings["channels"], embedding.settings["product"])
        row = row_elements(self.config, fold)
        blocks: dict[str, int | None] = {name: chosen[name].size * row[name] for name in row}
        blocks["templates"] = TEMPLATE_BLOCK
        return FoldPlan(chunks, unit, chunks.slow_down, policy, blocks, of_templates, request)

    def smallest(self, residues: int, *, rows: int | None = None, templates: int | None = None) -> int:
        """The smallest budget in bytes with which there is a plan."""
        fold = self.fold(residues, rows, templates)
        return smallest_that_works(self._operators(fold), host_budget=self.host_memory)

    def longest(self, budget: int, *, rows: int | None = None, templates: int | None = None) -> int:
        """The largest number of residues for which there is a plan within a budget."""
        return longest_that_fits(
            lambda n: self.smallest(n, rows=rows, templates=templates) if n else 0, budget
        )

    def _operators(self, fold: Fold) -> list[Operator]:
        room = OffloadRoom(self.host_memory, self.disk)
        return operators(self.config, fold, self.costs, room=room)

    def fold(self, residues: int, rows: int | None = None, templates: int | None = None) -> Fold:
        """Sizes of a fold; arguments as of :meth:`plan`."""
        return fold_sizes(
            self.config,
            residues,
            element_size=self.element_size,
            alignment_rows=rows,
            templates=templates,
            parameters=self.parameters,
            device=self.device,
            ranks=self.ranks,
            cuda_graph=self.cuda_graph,
        )


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of a network's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
