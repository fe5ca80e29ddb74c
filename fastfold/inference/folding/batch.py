"""Fold several targets of similar length in one pass of a network."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastfold.evoformer.model import AlphaFold
from fastfold.inference.embed.compute import Embedding
from fastfold.inference.ensemble.samples import Sample
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.folding.batch_passes import BatchTarget, run_batch
from fastfold.inference.folding.network import OnCycle
from fastfold.inference.folding.prediction import TargetFold
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.planning.planner import FoldPlan
from fastfold.inference.setting_values import BatchSize
from fastfold.memory import BudgetError

PADDING = 1.15  #: Largest length in a batch, as a multiple of the smallest
AUTO_BATCH = 8  #: Largest batch of ``auto``
AUTO_RESIDUES = {"cpu": 128, "cuda": 256}
"""Longest targets that ``auto`` batches, by the type of the device; longer ones fill it alone."""


class Request(NamedTuple):
    """Request for one prediction; see :meth:`fastfold.inference.folding.predictor.TargetPredictor.predict`.

    ``state`` and ``sample`` are those of a target that is folded alone.
    """

    predictor: TargetPredictor
    model: AlphaFold
    seed: int
    on_cycle: OnCycle | None = None
    state: RecycleState | None = None
    sample: Sample | None = None


class Answer(NamedTuple):
    """Prediction or embedding, its share of the duration, and the number of targets in its passes."""

    found: Prediction | Embedding
    seconds: float
    shared: int

    @property
    def prediction(self) -> Prediction:
        """The prediction."""
        assert isinstance(self.found, Prediction)
        return self.found


def group_by_length(lengths: Sequence[int], batch: BatchSize, device: torch.device) -> list[list[int]]:
    """Return groups of similar lengths as indices, in the order of each group's first target.

    ``batch`` is the largest number of targets in a group; ``auto`` depends on the device.
    """
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
    """Folder of several targets at once, in batches that fit into the memory.

    It says once for each reason why targets cannot share a pass.
    """

    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._said: set[str] = set()

    def predict(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        """Make predictions by one network, with the others' results if one fails.

        Targets that cannot share passes are folded alone. A batch that fails is folded again in halves, so that an
        error belongs to its target.
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
        found = self._together([requests[i] for i in together])
        answers |= zip(together, found, strict=True)
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
    """Return the plan of a batch; None if the batch does not fit into the memory without blocks.

    Each target counts with the memory of the longest one, including parameters.
    """
    fits = [request.predictor.fit(request.model) for request in requests]
    rows = [fit.rows for fit in fits if fit.rows is not None]
    templates = [fit.templates for fit in fits if fit.templates is not None]
    try:
        plan = fits[0].planner.plan(
            max(fit.residues for fit in fits),
            min(fit.budget for fit in fits) // len(fits),
            rows=max(rows) if len(rows) == len(fits) else None,
            templates=max(templates) if len(templates) == len(fits) else None,
        )
    except BudgetError:
        return None
    return None if plan.blocks else plan


def _alone(request: Request) -> Answer | Exception:
    start = time.monotonic()
    predictor, one = request.predictor, request
    make = predictor.predict if predictor.config.embed is None else predictor.embed
    try:
        found = make(one.model, one.seed, one.on_cycle, state=one.state, sample=one.sample)
    except Exception as error:
        return error
    return Answer(found, time.monotonic() - start, 1)


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
        targets = [
            BatchTarget(one.features, one.target.num_residues, one.passes, one.watch)
            for one in folds.values()
        ]
        with requests[0].predictor.moved(model):
            results = run_batch(model, targets, plan=plan)
    seconds = (time.monotonic() - start) / max(1, len(folds))
    for (index, one), (tree, arrays) in zip(folds.items(), results, strict=True):
        try:
            answers[index] = Answer(one.prediction(tree, arrays), seconds, len(folds))
        except Exception as error:  # of this target's results
            answers[index] = error
    return [answers[index] for index in range(len(requests))]
