"""Fold several targets of similar length in one pass of a network, each until its own last pass."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastfold.evoformer.model import AlphaFold, Features, distance_change, recycled
from fastfold.inference.embedding.compute import Embedding
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.folding.network import NetworkPasses, OnCycle, network_results, prepared_network
from fastfold.inference.folding.prediction import TargetFold
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.planning.planner import FoldPlan
from fastfold.inference.sampling.samples import Sample
from fastfold.inference.setting_values import BatchSize
from fastfold.memory import BudgetError

PADDING = 1.15  #: Largest length in a batch, as a multiple of the smallest
AUTO_BATCH = 8  #: Largest batch of ``auto``
AUTO_RESIDUES = {"cpu": 128, "cuda": 256}
"""Longest targets that ``auto`` batches, by the type of the device; longer ones fill it alone."""


class Request(NamedTuple):
    """Request for one prediction (:meth:`.TargetPredictor.predict`), ``state`` and ``sample`` if it folds alone."""

    predictor: TargetPredictor
    model: AlphaFold
    seed: int
    on_cycle: OnCycle | None = None
    state: RecycleState | None = None
    sample: Sample | None = None


class Answer(NamedTuple):
    """Prediction or embedding, its share of the duration, and the number of targets in its passes."""

    result: Prediction | Embedding
    seconds: float
    shared: int

    @property
    def prediction(self) -> Prediction:
        """The prediction."""
        assert isinstance(self.result, Prediction)
        return self.result


def group_by_length(lengths: Sequence[int], batch: BatchSize, device: torch.device) -> list[list[int]]:
    """Return indices of groups of up to ``batch`` similar lengths, in the order of each group's first target."""
    largest = AUTO_BATCH if batch == "auto" else batch
    longest = AUTO_RESIDUES.get(device.type, 0) if batch == "auto" else max(lengths, default=0)
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        last = groups[-1] if groups else []
        if last and len(last) < largest and lengths[index] <= min(longest, lengths[last[0]] * PADDING):
            last.append(index)
        else:
            groups.append([index])
    return sorted((sorted(group) for group in groups), key=lambda group: group[0])


@dataclass
class BatchFolder:
    """Folder of several targets at once, in batches that fit into the memory; tells why targets are folded alone."""

    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._said: set[str] = set()

    def predict(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        """Make predictions by one network, with the others' results if one fails.

        A batch that fails is folded again in halves, so that an error belongs to its target.
        """
        answers: dict[int, Answer | Exception] = {}
        together: list[int] = []
        for index, request in enumerate(requests):
            reason = request.predictor.reason_alone(request.model) if len(requests) > 1 else "one target"
            if reason:
                if len(requests) > 1 and reason not in self._said:
                    self._said.add(reason)
                    self.say(f"warning: not batched: {reason}")
                answers[index] = _alone(request)
            else:
                together.append(index)
        batched = self._together([requests[i] for i in together])
        answers |= zip(together, batched, strict=True)
        return [answers[index] for index in range(len(requests))]

    def _together(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        if len(requests) < 2:
            return [_alone(request) for request in requests]
        if (plan := batch_plan(requests)) is not None:
            try:
                return _fold_batch(requests, plan)
            except Exception as error:
                if is_out_of_memory(error):
                    self.say(
                        f"warning: out of memory for {len(requests)} targets at once; trying half of them"
                    )
            # Outside of the handler, because the exception keeps the tensors of the failed run alive.
            gc.collect()
            if requests[0].predictor.device.type == "cuda":
                torch.cuda.empty_cache()
        half = -(-len(requests) // 2)
        return [*self._together(requests[:half]), *self._together(requests[half:])]


def batch_plan(requests: Sequence[Request]) -> FoldPlan | None:
    """Return the plan of targets as long as the longest; None if they do not fit into the memory without blocks."""
    fits = [request.predictor.fit(request.model) for request in requests]
    rows = [fit.planner.rows for fit in fits if fit.planner.rows is not None]
    templates = [fit.planner.templates for fit in fits if fit.planner.templates is not None]
    planner = replace(
        fits[0].planner,
        rows=max(rows) if len(rows) == len(fits) else None,
        templates=max(templates) if len(templates) == len(fits) else None,
    )
    try:
        plan = planner.plan(max(fit.residues for fit in fits), min(fit.budget for fit in fits) // len(fits))
    except BudgetError:
        return None
    return None if plan.blocks else plan


def _alone(request: Request) -> Answer | Exception:
    start = time.monotonic()
    predictor, one = request.predictor, request
    make = predictor.predict if predictor.config.embed is None else predictor.embed
    try:
        result = make(one.model, one.seed, one.on_cycle, state=one.state, sample=one.sample)
    except Exception as error:
        return error
    return Answer(result, time.monotonic() - start, 1)


def _fold_batch(requests: Sequence[Request], plan: FoldPlan) -> list[Answer | Exception]:
    start = time.monotonic()
    answers: dict[int, Answer | Exception] = {}
    folds: dict[int, TargetFold] = {}
    model = requests[0].model
    for index, request in enumerate(requests):
        try:
            folds[index] = request.predictor.target_fold(model, request.seed, request.on_cycle)
        except Exception as error:  # of this target's features
            answers[index] = error
    results = []
    if folds:
        with requests[0].predictor.moved(model):
            targets = [
                BatchTarget(one.source(), one.target.num_residues, one.passes, one.watch)
                for one in folds.values()
            ]
            results = run_batch(model, targets, plan=plan)
    seconds = (time.monotonic() - start) / max(1, len(folds))
    for (index, one), (tree, arrays) in zip(folds.items(), results, strict=True):
        try:
            answers[index] = Answer(one.prediction(tree, arrays), seconds, len(folds))
        except Exception as error:  # of this target's results
            answers[index] = error
    return [answers[index] for index in range(len(requests))]


NetworkResults = tuple[dict[str, Any], dict[str, Tensor]]
"""Result tree and scores, as :func:`fastfold.inference.folding.network.run_network` returns them."""


@dataclass(frozen=True)
class BatchTarget:
    """Target of a batch: a function ``(cycle, member)`` that returns features, and settings that all targets share."""

    features: Callable[[int, int], Mapping[str, Tensor]]
    residues: int
    passes: NetworkPasses
    on_cycle: OnCycle | None = None


def run_batch(
    model: AlphaFold, targets: Sequence[BatchTarget], *, plan: FoldPlan | None = None
) -> list[NetworkResults]:
    """Run a network on several targets at once, and return the results of each.

    A target leaves the batch after its last pass, so that early stops are those of single folds. Results differ from
    single folds by rounding only. The plan is without blocks, for the longest target; None for the default policy.
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
    """Stack features of several targets along a new first axis, padded with zeros (masks too) to the largest shape."""
    stacked: Features = {}
    for key, first in samples[0].items():
        values = [sample[key] for sample in samples]
        largest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
        padded = first.new_zeros(len(values), *largest)
        for row, value in zip(padded, values, strict=True):
            row[tuple(map(slice, value.shape))] = value
        stacked[key] = padded
    return stacked


def _own(value: Tensor, row: int, residues: int, key: str) -> Tensor:
    """Return a view of one target's part of a batch's representation."""
    if key == "pair":
        return value[row, :residues, :residues]
    return value[row, :, :residues] if key == "msa" else value[row, :residues]
