"""A model's stages on the ranks of ``pp``, run by the schedules of ``torch.distributed.pipelining``.

Microbatches pass through the stages, forward and backward (:meth:`Pipeline.step`) or forward only
(:meth:`Pipeline.evaluate`). A rank has one stage, or with an interleaved schedule several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils._pytree import tree_leaves

from fastfold.errors import ConfigError, FastFoldError, LostProcessError, first_line
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import shard_slices
from fastfold.parallel.parallel_model import Parallel

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
SINGLE = ("gpipe", "1f1b")  #: Schedules with one stage for each rank

Inputs = Sequence[tuple[Any, ...]]
Loss = Callable[[Any, int], Tensor]


class _PipelineStage(nn.Module):
    """A stage of a schedule: tensors come from the previous stage, other arguments by the microbatch's number."""

    def __init__(self, module: nn.Module, first: bool, pipeline: Pipeline) -> None:
        super().__init__()
        self.module, self.first, self._pipeline = module, first, pipeline

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        i = int(number[0])
        inputs = self._pipeline.inputs[i] if self.first else received
        return self.module(*inputs, **self._pipeline.everywhere[i])


class Pipeline:
    """Runs a parallel model's stages.

    Every stage's result (a tensor or a tuple) is the input of the next. The gradient of the sum of the microbatches'
    losses is added to the parameters; :meth:`Parallel.reduce_gradients` then sums it over the replicas.

    Args:
        parallel: A model with ``pp`` above 1 and its plan's stages on this rank.
        schedule: ``gpipe``, ``1f1b``, ``interleaved`` or ``zero_bubble``; the latter two with at least two stages
            on each rank.

    Raises:
        ConfigError: The schedule is unknown, or does not match the number of stages.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.parallel import ParallelPlan, Pipeline, parallelize, split_blocks
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> def stages(model, count):
        ...     return [nn.Sequential(*part) for part in split_blocks(model, count)]
        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        >>> with fake_mesh(ParallelPlan(pp=2), rank=1) as mesh:  # simulates the second of two ranks
        ...     pipeline = Pipeline(parallelize(model, mesh, stages=stages), schedule="1f1b")
        >>> pipeline.has_last, {number: len(stage) for number, stage in pipeline.stages.items()}
        (True, {1: 2})
    """

    def __init__(self, parallel: Parallel, schedule: str = "1f1b") -> None:
        if schedule not in SCHEDULES:
            raise ConfigError(
                f"schedule of a pipeline: expected one of {', '.join(SCHEDULES)}, found {schedule!r}"
            )
        group = parallel.mesh.group("pp")
        if group.size == 1 or not isinstance(parallel.module, nn.ModuleDict):
            raise ConfigError("a pipeline needs a plan with pp of at least 2")
        self.parallel, self.group, self.schedule = parallel, group, schedule
        self.stages = {int(number): stage for number, stage in parallel.module.items()}
        each = len(self.stages)
        if (each == 1) != (schedule in SINGLE):
            wanted = "one stage" if schedule in SINGLE else "at least two stages"
            raise ConfigError(f"schedule {schedule}: expected {wanted} on each rank, found {each}")
        self.count = each * group.size
        # Arguments of the running pass's microbatches, which stages look up by number.
        self.inputs: Inputs = ()
        self.everywhere: Sequence[Mapping[str, Any]] = ()
        self._built: dict[Any, Any] = {}
        self._loss: Loss | None = None
        self._outputs: dict[int, Any] = {}

    @property
    def has_last(self) -> bool:
        """True if the last stage is on this rank."""
        return self.count - 1 in self.stages

    def step(
        self, inputs: Inputs, loss: Loss, everywhere: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Tensor]:
        """Run forward and backward passes of all microbatches.

        Args:
            inputs: For each microbatch the first stage's arguments. Every rank gives them, in equal shapes: the shapes
                between stages are announced once.
            loss: Function from ``(result of the last stage, number of the microbatch)`` to the loss.
            everywhere: For each microbatch keyword arguments of every stage that are not sent (masks).

        Returns:
            The microbatches' losses on the rank of the last stage, an empty list on the others.

        Raises:
            ConfigError: Microbatches differ in shape, or are too few for the schedule.
        """
        self._loss = loss
        losses: list[Tensor] = []
        agreement = self.parallel.gradients.agreement
        with nullcontext() if agreement is None else agreement.pipeline_pass():
            self._run("step", inputs, everywhere, {"losses": losses} if self.has_last else {})
        return [x.detach() for x in losses]

    @torch.no_grad()
    def evaluate(self, inputs: Inputs, everywhere: Sequence[Mapping[str, Any]] | None = None) -> list[Any]:
        """Run forward passes only; return the microbatches' results on the last stage's rank, else an empty list."""
        self._loss = None
        self._run("eval", inputs, everywhere, {})
        return [self._outputs[i] for i in sorted(self._outputs)]

    def _run(
        self,
        method: str,
        inputs: Inputs,
        everywhere: Sequence[Mapping[str, Any]] | None,
        more: dict[str, Any],
    ) -> None:
        count = len(inputs)
        self.inputs, self.everywhere = inputs, everywhere or [{}] * count
        self._outputs = {}
        numbers = torch.arange(count)
        if self.has_last:
            more = more | {"target": numbers}
        try:
            schedule = self._schedule(method, count)
            if self.parallel.stage_comparison is not None:
                self.parallel.stage_comparison.compare(inputs[0], self.everywhere[0])
            # Results of microbatches are not joined: they may be losses, which are scalars.
            getattr(schedule, method)(number=numbers, return_outputs=False, **more)
        except Exception as error:
            raise self._explained(error) from error
        finally:
            self.inputs, self.everywhere = (), ()

    def _explained(self, error: Exception) -> Exception:
        """Return an error with the rank and its stages."""
        if isinstance(error, FastFoldError | torch.OutOfMemoryError):
            return error
        where = f"rank {self.group.rank} of {self.group} (pipeline stages {', '.join(map(str, self.stages))})"
        if async_ops.is_lost(error):
            return LostProcessError(
                f"{where} lost another stage, which failed or ended: look for the first error in the output of the "
                "other ranks, and start all of them again"
            )
        return ConfigError(f"{where} raises {type(error).__name__}: {first_line(error)}")

    def _schedule(self, method: str, count: int) -> Any:
        """Return the schedule for microbatches of these shapes.

        The first use fixes whether received tensors have gradients.
        """
        shapes = [
            tuple((tuple(x.shape), x.dtype) for x in tree_leaves(microbatch) if isinstance(x, Tensor))
            for microbatch in zip(self.inputs, self.everywhere, strict=True)
        ]
        odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is not None:
            raise ConfigError(
                f"microbatch {odd} of a pipeline: expected tensors {[s for s, _ in shapes[0]]} as in the first, found "
                f"{[s for s, _ in shapes[odd]]}"
            )
        if count < self.group.size:
            raise ConfigError(
                f"expected at least {self.group.size} microbatches for pp={self.group.size}, found {count}"
            )
        key = (method, count, shapes[0])
        if key not in self._built:
            device = next(iter(self.parallel.module.parameters())).device
            made = [
                PipelineStage(
                    _PipelineStage(stage, number == 0, self),
                    number,
                    self.count,
                    device,
                    group=self.group.process_group,
                )
                for number, stage in self.stages.items()
            ]
            kind = SCHEDULES[self.schedule]
            self._built[key] = kind(
                made[0] if self.schedule in SINGLE else made,
                count,
                loss_fn=self._compute_loss,
                scale_grads=False,
            )
        return self._built[key]

    def _compute_loss(self, result: Any, number: Tensor) -> Tensor:
        i = int(number[0])
        if self._loss is None:
            self._outputs[i] = result
            return torch.zeros(())
        return self._loss(result, i)


def split_blocks(blocks: Sequence[nn.Module], stages: int) -> list[list[nn.Module]]:
    """Split blocks into consecutive ones for each stage; a remainder goes to the first stages.

    Raises:
        ConfigError: There are fewer blocks than stages.

    Example:
        >>> from torch import nn
        >>> from fastfold.parallel import split_blocks
        >>> blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        >>> first, second = split_blocks(blocks, stages=2)
        >>> len(first), len(second), second[0] is blocks[3]
        (3, 2, True)
    """
    if len(blocks) < stages:
        raise ConfigError(f"{len(blocks)} blocks cannot be split into {stages} pipeline stages")
    return [list(blocks[part]) for part in shard_slices(len(blocks), stages)]
