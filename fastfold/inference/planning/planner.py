"""Plan a fold within a memory budget."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from ml_collections import ConfigDict

from fastfold.evoformer.config import is_multimer
from fastfold.evoformer.execution import ExecutionPolicy, PolicyModule, policies_of
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.network_settings import max_rows
from fastfold.inference.planning.memory_model import (
    ATTENTION_STEPS,
    MAX_BLOCK,
    TEMPLATE_BLOCK,
    Fold,
    OffloadRoom,
    max_block,
    operators,
    row_elements,
)
from fastfold.inference.planning.time_model import Costs
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
from fastfold.memory import HostBuffers
from fastfold.memory.block_sizes import (
    BlockedOperator,
    BlockPlan,
    choose_candidates,
    longest_that_fits,
    smallest_that_works,
)

# Updates are in place, and no layer holds more than 16 MiB of intermediate results at once (float32). Scores compute
# logits of pairs in blocks of rows.
FOLDING_POLICY = ExecutionPolicy(
    block_elements=MAX_BLOCK,
    inplace=True,
    lazy_logits=True,
    heads=("predicted_lddt", "predicted_aligned_error"),
)


def folding_policy(device: str) -> ExecutionPolicy:
    """Return the policy of a fold without a memory limit on a type of device, whose largest blocks it has."""
    return FOLDING_POLICY if device == "cpu" else replace(FOLDING_POLICY, block_elements=max_block(device))


SMALL_PAIR = 8 << 20  #: Bytes of a pair tensor below which a fold may keep its freed memory


@dataclass(frozen=True)
class FoldRequest:
    """Arguments of :meth:`Planner.plan` and the planner's own except ``host``; equal ones give equal plans anywhere."""

    planner: Mapping[str, Any]
    residues: int
    budget: int

    def plan(self, host: HostBuffers) -> FoldPlan:
        """Make the plan with the buffers for offloaded tensors in this process, or raise BudgetError."""
        return Planner(host=host, **self.planner).plan(self.residues, self.budget)


@dataclass(frozen=True)
class FoldPlan:
    """Plan of a fold."""

    chunks: BlockPlan  #: Candidate chosen for each step
    unit: int  #: Bytes of the pair tensor, U
    slow_down: float  #: Expected time relative to a plan without a memory limit
    policy: ExecutionPolicy  #: Execution policy of the network; :func:`folding_policy` if everything fits
    blocks: dict[str, int | None]  #: ``block_elements`` of steps where they differ from the policy's
    templates: ContractionPlan  #: Contraction plan of the templates' pair stacks
    request: FoldRequest  #: Request of the plan

    def policies(self, model: AlphaFold) -> dict[PolicyModule, ExecutionPolicy]:
        """Return the policies of a call of a network, and tell the host's buffers what to expect."""
        host = self.policy.contraction.host or self.policy.offload or self.templates.host
        if host is not None:
            host.expected = self.chunks.host
            if host.overflow is not None:
                host.overflow.expected = self.chunks.disk
        policies = policies_of(model, self.policy, self.blocks)
        if model.template_embedder is not None:
            stack = model.template_embedder.get_submodule("stack")
            # The plan counts attention of templates in the blocks of the kernel.
            policy = replace(self.policy, contraction=self.templates, attention_at_once=False)
            policies |= policies_of(stack, policy, self.blocks)
        return policies

    @property
    def peak(self) -> int:
        """Predicted peak in bytes."""
        return self.chunks.peak

    @property
    def is_roomy(self) -> bool:
        """True if a small pair and a large budget allow freed memory to stay in the process."""
        return self.unit < SMALL_PAIR and 2 * self.peak <= self.request.budget

    def table(self) -> list[tuple[str, str, int]]:
        """Return each step with its chunks in words and its peak in bytes."""
        rows = []
        for operator in self.chunks.operators:
            candidate = self.chunks.chosen[operator.name]
            words = f"{candidate.size:,} {operator.unit}"
            if operator.unit == "kept":
                words = "all kept" if candidate.size else "embedded twice"
            for key, what in (("pair", "pair"), ("product", "product"), ("kept", "product")):
                if away := 1.0 - candidate.settings.get(key, 1.0):
                    words += f", {what if away == 1.0 else f'{away:.0%} of the {what}'} on the host"
            rows.append((operator.name, words, operator.resident + candidate.working))
        return rows


@dataclass(frozen=True)
class Planner:
    """Planner for one network on one device, and for an alignment and templates."""

    config: ConfigDict  #: Official configuration tree
    element_size: int  #: Bytes per element of the trunk (4 for float32, 2 for bfloat16)
    device: str = "cpu"  #: ``cpu`` or ``cuda``
    costs: Costs = field(default_factory=Costs)  #: Costs of the candidates on the device
    host_memory: int = 0  #: Bytes of host memory for offloaded tensors; 0 for none
    parameters: int = 0  #: Bytes of the parameters
    host: HostBuffers = field(default_factory=HostBuffers)  #: Buffers for offloaded tensors
    disk: int = 0  #: Bytes of a disk for tensors that exceed the host memory
    ranks: int = 1  #: Number of processes that share the target, each with such a device and host memory
    cuda_graph: bool = False  #: True if passes are replayed from a CUDA graph
    rows: int | None = None  #: Rows of all alignments; None for the network's maximum
    templates: int | None = None  #: Number of templates; None for the network's maximum

    def plan(self, residues: int, budget: int) -> FoldPlan:
        """Return the fastest plan of a target's length within a budget in bytes, or raise BudgetError."""
        fold = self.fold(residues)
        chunks = choose_candidates(self._operators(fold), budget, host_budget=self.host_memory)
        chosen = chunks.chosen
        unit = residues**2 * int(self.config.model.embeddings_and_evoformer.pair_channel) * self.element_size
        everything = folding_policy(self.device)
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "host"}
        request = FoldRequest(own, residues, budget)
        if self.device == "cuda":
            everything = replace(
                everything,
                contraction=ContractionPlan(chosen["triangle multiplication"].size),
                attention_at_once=fold.attends_at_once,
            )
        row = row_elements(self.config, fold)
        blocks: dict[str, int | None] = {name: chosen[name].size * row[name] for name in row}
        if all(chosen[o.name] == o.candidates[0] for o in chunks.operators):
            blocks = {name: blocks[name] for name in ATTENTION_STEPS} if fold.attends_at_once else {}
            return FoldPlan(chunks, unit, 1.0, everything, blocks, everything.contraction, request)

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
        blocks["templates"] = TEMPLATE_BLOCK
        return FoldPlan(chunks, unit, chunks.slow_down, policy, blocks, of_templates, request)

    def smallest(self, residues: int) -> int:
        """Return the smallest budget in bytes for which a plan exists."""
        return smallest_that_works(self._operators(self.fold(residues)), host_budget=self.host_memory)

    def longest(self, budget: int) -> int:
        """Return the largest number of residues for which a plan within a budget exists."""
        return longest_that_fits(self.smallest, budget)

    def _operators(self, fold: Fold) -> list[BlockedOperator]:
        return operators(self.config, fold, self.costs, room=OffloadRoom(self.host_memory, self.disk))

    def fold(self, residues: int) -> Fold:
        """Return the sizes of a fold."""
        most_clusters, most_extra = max_rows(self.config)
        template = self.config.model.embeddings_and_evoformer.template
        shown = template.max_templates if template.enabled else 0
        if self.templates is not None and not is_multimer(self.config):
            # The multimer network embeds empty templates too.
            shown = min(self.templates, shown)
        rows = most_clusters + most_extra if self.rows is None else max(1, self.rows)
        clusters = min(rows, most_clusters)
        extra = min(max(1, rows - clusters), most_extra)
        fold = Fold(residues, self.element_size, clusters, extra, shown, rows, self.parameters, self.device)
        return replace(fold, ranks=self.ranks, cuda_graph=self.cuda_graph)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a network's parameters, also of those that are stored in 8 bits, which are buffers."""
    return sum(x.numel() * x.element_size() for x in itertools.chain(model.parameters(), model.buffers()))
