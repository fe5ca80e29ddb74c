"""Run a network on several targets at once: padded to the longest, each until its own last pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastfold.evoformer.model import AlphaFold, Features, distance_change, recycled
from fastfold.inference.folding.network import NetworkPasses, OnCycle, network_results, prepared_network
from fastfold.inference.planning.planner import FoldPlan

NetworkResults = tuple[dict[str, Any], dict[str, Tensor]]
"""Result tree and scores, as :func:`fastfold.inference.folding.network.run_network` returns them."""


@dataclass(frozen=True)
class BatchTarget:
    """Target of a batch: a function ``(cycle, member)`` that returns the features of one pass, and settings of its run.

    All targets of a batch have the same numbers of passes and samples.
    """

    features: Callable[[int, int], Mapping[str, Tensor]]
    residues: int
    passes: NetworkPasses
    on_cycle: OnCycle | None = None


def run_batch(
    model: AlphaFold, targets: Sequence[BatchTarget], *, plan: FoldPlan | None = None
) -> list[NetworkResults]:
    """Run a network on several targets at once, and return the results of each.

    A target leaves the batch after its last pass, so that early stops are those of single folds. Results differ from
    single folds by rounding only. Targets have neither dropout nor CUDA graphs, and the plan is that of a fold with the
    longest target's length, without blocks; None for the default policy.
    """
    first = targets[0].passes
    with prepared_network(model, first, plan, distogram=any(t.passes.reads_distogram for t in targets)):
        return _Batch(model, targets, first).run()


_RESIDUES = ("seq_mask", "asym_id", "aatype", "residue_index")
"""Features ``[B, N]`` that results are computed from, kept after a pass."""


class _Pass(NamedTuple):
    """Number of a pass, the features that results are computed from, its ``prev_pos``, and its results."""

    cycle: int
    features: Features
    before: Features
    representations: Features
    structure: dict[str, Any]


class _Batch:
    """Recycling of a batch: targets with passes left in the order of the batch axis, and each one's last pass."""

    def __init__(self, model: AlphaFold, targets: Sequence[BatchTarget], passes: NetworkPasses) -> None:
        self.model, self.targets, self.passes = model, targets, passes
        self.device = next(model.parameters()).device
        self.active = list(range(len(targets)))
        self.limits = [passes.num_recycles] * len(targets)
        self.results: dict[int, NetworkResults] = {}

    def run(self) -> list[NetworkResults]:
        previous: Features | None = None
        for cycle in count():
            members = [self._features(cycle, member) for member in range(self.passes.num_ensemble)]
            kept: Features = {key: members[0][key] for key in _RESIDUES if key in members[0]}
            if previous is None:
                previous = self.model.first_previous(members[0])
            before = {"prev_pos": previous["prev_pos"]}
            representations, structure = self.model.iterate(members, previous)
            previous = None
            done = _Pass(cycle, kept, before, representations, structure)
            for row, target in enumerate(self.active):
                self._end_pass(done, row, target)
            rows = [row for row, target in enumerate(self.active) if target not in self.results]
            self.active = [self.active[row] for row in rows]
            if not self.active:
                return [self.results[target] for target in range(len(self.targets))]
            previous = self._chosen(recycled(representations, structure), rows)
            del done, representations, structure
        raise AssertionError("unreachable")

    def _features(self, cycle: int, member: int) -> Features:
        samples = [self.targets[target].features(cycle, member) for target in self.active]
        return {key: value.to(self.device) for key, value in pad_features(samples).items()}

    def _end_pass(self, done: _Pass, row: int, target: int) -> None:
        """Report one target's pass; compute its results if it is the last, or choose the last one."""
        one, cycle = self.targets[target], done.cycle
        n = one.residues
        own = {key: _own(value, row, n, key) for key, value in done.representations.items()}
        kept = ("final_atom_positions", "final_atom_mask", "final_affines")
        structure: dict[str, Any] = {key: done.structure[key][row, :n] for key in kept}
        angles = done.structure["sidechains"]["angles_sin_cos"]
        structure["sidechains"] = {"angles_sin_cos": angles[:, row, :n]}
        features = {key: value[row, :n] for key, value in done.features.items()}
        self.model.report_pass(one.on_cycle, cycle, own, structure)
        if cycle == self.limits[target]:
            tree = self.model.result_tree(own, structure, features, cycle)
            self.results[target] = network_results(tree, one.passes)
            # The next pass overwrites the batch's pair.
            wanted = ("single", "pair", "structure_module") if self.passes.representations else ()
            tree["representations"] = {key: own[key].clone() for key in wanted}
        elif self.passes.recycle_tolerance > 0:
            was = {"prev_pos": done.before["prev_pos"][row, :n]}
            now = {"prev_pos": structure["final_atom_positions"]}
            if distance_change(was, now, features["seq_mask"]) <= self.passes.recycle_tolerance:
                # The official loop runs one more pass after the tolerance is met.
                self.limits[target] = cycle + 1

    def _chosen(self, previous: Features, rows: Sequence[int]) -> Features:
        """Return the active targets' part of the recycled results, without padding that no target needs."""
        n = max(self.targets[target].residues for target in self.active)
        index = torch.tensor(rows, device=self.device)

        def part(key: str, value: Tensor) -> Tensor:
            if len(rows) < len(value):
                value = value.index_select(0, index)
            cut = value[:, :n, :n] if key == "prev_pair" else value[:, :n]
            return cut.contiguous()

        return {key: part(key, value) for key, value in previous.items()}


def pad_features(samples: Sequence[Mapping[str, Tensor]]) -> Features:
    """Stack features of several targets along a new first axis, padded with zeros to the largest shape.

    All have the same keys and numbers of axes. Masks are zero in the padding, so that networks ignore its residues and
    alignment rows.
    """
    stacked: Features = {}
    for key, first in samples[0].items():
        values = [sample[key] for sample in samples]
        largest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
        found = first.new_zeros(len(values), *largest)
        for row, value in zip(found, values, strict=True):
            row[tuple(map(slice, value.shape))] = value
        stacked[key] = found
    return stacked


def _own(value: Tensor, row: int, residues: int, key: str) -> Tensor:
    """Return a view of one target's part of a batch's representation."""
    if key == "pair":
        return value[row, :residues, :residues]
    return value[row, :, :residues] if key == "msa" else value[row, :residues]
