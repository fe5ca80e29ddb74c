"""ZeRO 0 to 2: ranks with the same parameters shard nothing, optimizer states, or gradients too.

The gradient is that of the sum of all ranks' losses. It is summed in two steps. The first is over the ranks that work
on one sample (``sp``, ``dap``) and gives the sample's gradient. The second is over ranks with other samples (``dp``).
Between the two a caller may clip each sample's gradient, or add up several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.buckets import Bucket, Buckets, Sharding
from fastfold.parallel.data_parallel.early_reduction import EarlyReduction, apart
from fastfold.parallel.data_parallel.kept_gradients import (
    BEFORE_REDUCTION,
    ReducedGradients,
    changed_message,
    is_kept,
)
from fastfold.parallel.data_parallel.sharded_norm import ShardNorms
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.device import AbsentTensor

# Groups of one sample, in the order in which gradients are summed: the innermost first.
SAMPLE_GROUPS = ("dap", "sp")
DATA_GROUPS = ("dp",)

_SCATTERED = (
    "under zero=1 and zero=2 each rank has a piece of the gradient; clip with clip_grad_norm_() of the object that "
    "parallelize() returned, and call optimizer.zero_grad() before the next backward()"
)


class Replicated(ReducedGradients):
    """Stage 0: every rank holds all parameters, gradients and optimizer states.

    The parameters train, and are this rank's blocks where tensor parallel layers cut them over ``shard_groups``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
        shard_groups: Mapping[str, Sequence[Group]],
    ) -> None:
        super().__init__(parameters, ShardNorms(shard_groups, mesh.group("pp")))
        self.mesh, self.shard_groups = mesh, shard_groups
        self.sample = Sharding([mesh.group(name) for name in SAMPLE_GROUPS])
        self.data = Sharding([mesh.group(name) for name in DATA_GROUPS])
        self.every = Sharding([*self.sample.groups, *self.data.groups])
        self._values = list(parameters.values())
        self._kinds = {name: (p.shape, p.dtype, p.device) for name, p in parameters.items()}
        self.buckets = Buckets(self._values, self.every.ranks)
        self._used = [False] * len(self._values)
        self._left: list[TensorWeakRef] = []
        self._early: dict[bool, EarlyReduction | None] = {}
        self._under_way: EarlyReduction | None = None
        self._over_data = False  # True if take_sample() sums over ranks with other samples too

    # ---- parameters of the optimizer -----------------------------------------------------------------

    def all_gather_params(self) -> None:
        """Give every rank all parameters after the optimizer's step."""

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors laid out like :attr:`optimised` to this rank's parameters' shapes (a collective)."""
        found = {name: x for part in self.wholes(values) for name, x in part.items()}
        return {name: found[name] for name in self.names if name in found}

    def wholes(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield :meth:`whole` for some tensors at a time."""
        yield dict(values)

    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors in the shapes of this rank's parameters to the layout of :attr:`optimised`."""
        return dict(values)

    def check_step(self) -> None:
        """Refuse a step whose gradients are not those of :meth:`finish`.

        Raises:
            ConfigError: Gradients were not summed over the ranks since the last step, or a function that sees only this
                rank's part changed them.
        """
        if self._finished is None:
            if self.stage or self.every.ranks > 1 or self._aside:
                raise ConfigError(BEFORE_REDUCTION)
            return
        whole = not self.stage and not any(self.shard_groups.values()) and self.mesh.plan.pp == 1
        for name, parameter in self.optimised.items() if not whole else ():
            if not is_kept(parameter.grad, self._finished.get(name)):
                raise ConfigError(changed_message(name))

    def check_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Refuse a parameter that replaced the one that the optimizer steps.

        Raises:
            ConfigError: It is another object, or its dtype, shape or device differs.
        """
        kind = parameter.shape, parameter.dtype, parameter.device
        if parameter is not self.parameters[name] or kind != self._kinds[name]:
            raise ConfigError(
                f"{name} was replaced after parallelize(), and its optimizer would not step the new tensor; call "
                "load_state_dict() of the object that parallelize() returned instead of passing assign=True, and "
                "convert or move the model before parallelize()"
            )

    def accept_gradients(self) -> None:
        """Accept the present gradients as those of the step, which the next pass must not find."""
        super().accept_gradients()
        self._left = [TensorWeakRef(p.grad) for p in self._values if p.grad is not None]

    def forget_gradients(self) -> None:
        """Clear all gradients and their records."""
        super().forget_gradients()
        self._over_data = False
        if self._under_way is not None:
            self._under_way.forget()

    def _clear(self) -> None:
        super()._clear()
        self._left = []

    # ---- gradients -------------------------------------------------------------------------------------

    def take_sample(self) -> list[Tensor]:
        """Return the gradient of the sample, summed over the ranks that worked on it (a collective).

        The buffers may be scaled and added to those of another sample. The parameters' ``grad`` is None afterwards.

        Raises:
            ConfigError: The gradients of the last step were not cleared, and this sample's were added to them.
        """
        if self._under_way is not None:
            early, self._under_way = self._under_way, None
            self._over_data = early is self._early.get(True)
            buffers, numbers = early.take()
            self._used = [used or number in numbers for number, used in enumerate(self._used)]
            self._finished, self._left = None, []
            return buffers
        self._refuse_left()
        self._finished, self._left = None, []
        self._used = [used or p.grad is not None for used, p in zip(self._used, self._values, strict=True)]
        found = []
        for bucket in self.buckets:
            flat = self.buckets.join(bucket, [p.grad for p in self._values])
            for number in bucket.numbers:
                self._values[number].grad = None
            found.append(self._start_sample(self.sample, flat)())
        return found

    def _refuse_left(self) -> None:
        left = {id(gradient) for kept in self._left if (gradient := kept()) is not None}
        if any(id(p.grad) in left for p in self._values):
            raise ConfigError(
                "the gradients of the last step were not cleared: call optimizer.zero_grad() before backward()"
            )

    @contextmanager
    def overlapped(self, *, data: bool = False) -> Iterator[None]:
        """Sum gradients during the last backward pass before :meth:`take_sample`.

        The early sum is over the ranks of one sample. If a sample has one rank, only ``data=True`` starts a sum early:
        the caller promises to pass the result of :meth:`take_sample` to :meth:`finish` unchanged, so that the sum may
        be the one over ranks with other samples.

        Raises:
            ConfigError: The gradients of the last step were not cleared, or other backward passes interfere.
        """
        self._refuse_left()
        data = data and not self.sample.groups
        if data not in self._early:
            first, start = (self.data, self._start_data) if data else (self.sample, self._start_sample)
            ways = apart(first, self.mesh.reporter)
            early = EarlyReduction(self._values, self.buckets, partial(start, ways))
            self._early[data] = early if first.groups else None
        chosen = self._early[data]
        if chosen is None:
            yield
            return
        with chosen.during():
            self._under_way = chosen
            yield

    def zeros(self) -> list[Tensor]:
        """Return the result of :meth:`take_sample` for a gradient of zeros."""
        return [
            self._values[bucket.numbers[0]].new_zeros(self._length_of_sample(bucket))
            for bucket in self.buckets
        ]

    def squared_norm(self, buffers: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of a sample's gradient; a collective where parameters are sharded."""
        return self._norms.total(self._by_name(buffers))

    def finish(self, buffers: Sequence[Tensor]) -> None:
        """Sum over ranks with other samples into ``grad`` of the optimizer's parameters (a collective).

        Parameters that no rank used get None.
        """
        self._finish(buffers, self._used_anywhere())
        if self.agreement is not None:
            self.agreement.check({name: p.grad for name, p in self.optimised.items()})
        self.accept_gradients()

    def _finish(self, buffers: Sequence[Tensor], used: Sequence[bool]) -> None:
        for bucket, total in zip(self.buckets, self._summed(buffers), strict=True):
            for number, gradient in self.buckets.split(bucket, total).items():
                self._values[number].grad = gradient if used[number] else None

    def _summed(self, buffers: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield buffers of samples, summed over the ranks with other samples."""
        done, self._over_data = self._over_data, False
        for flat in buffers:
            yield flat if done else self._start_data(self.data, flat)()

    def _used_anywhere(self) -> list[bool]:
        """Return which parameters had a gradient on any rank since the last call (a collective)."""
        own, self._used = self._used, [False] * len(self._values)
        if not own or self.every.ranks == 1:
            return own
        flags = torch.tensor(own, dtype=torch.float32, device=self._values[0].device)
        total = self.every.start_all_reduce(flags)()
        # If this rank used all parameters, it need not wait for the sum.
        return own if total.is_meta or all(own) else [bool(x) for x in total.cpu()]

    def _start_sample(self, ranks: Sharding, flat: Tensor) -> Callable[[], Tensor]:
        return ranks.start_all_reduce(flat)

    def _start_data(self, ranks: Sharding, flat: Tensor) -> Callable[[], Tensor]:
        return ranks.start_all_reduce(flat)

    def _length_of_sample(self, bucket: Bucket) -> int:
        return bucket.length

    def _by_name(self, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
        """Convert buffers of a sample to one tensor for each parameter."""
        found: dict[int, Tensor] = {}
        for bucket, flat in zip(self.buckets, buffers, strict=True):
            found |= self.buckets.split(bucket, flat)
        return {name: found[number] for number, name in enumerate(self.names)}


class ShardedStates(Replicated):
    """Stage 1: each rank's optimizer updates its shard of the parameters, and the ranks exchange the shards.

    The optimizer updates flat pieces of the parameters, which share their memory.
    """

    stage = 1

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
        shard_groups: Mapping[str, Sequence[Group]],
    ) -> None:
        for parameter in parameters.values():
            parameter.data = parameter.data.contiguous()
        super().__init__(parameters, mesh, shard_groups)
        self._pieces: dict[str, nn.Parameter] = {}
        self._spans = [self.buckets.spans(bucket, self.every.own(bucket.length)) for bucket in self.buckets]
        for spans in self._spans:
            for number, (of_parameter, _) in spans.items():
                piece = self._values[number].data.view(-1)[of_parameter]
                self._pieces[self.names[number]] = nn.Parameter(piece)
        self._pieces = {name: self._pieces[name] for name in self.names}
        self._own_elements = {
            self.names[number]: own for spans in self._spans for number, (own, _) in spans.items()
        }

    def check_step(self) -> None:
        """Check as in stage 0, after the pieces follow parameters to new memory (``.data =``)."""
        for spans in self._spans:
            for number, (of_parameter, _) in spans.items():
                parameter, piece = self._values[number], self._pieces[self.names[number]]
                memory = parameter.untyped_storage().data_ptr()
                if piece.numel() and piece.untyped_storage().data_ptr() != memory:
                    parameter.data = parameter.data.contiguous()
                    piece.data = parameter.data.view(-1)[of_parameter]
        super().check_step()

    @property
    def optimised(self) -> dict[str, nn.Parameter]:
        """Pieces ``[n]`` of this rank; some are empty."""
        return self._pieces

    @cached_property
    def norms(self) -> ShardNorms:
        """Norms of the pieces."""
        return self._norms_over(self.every.groups)

    def _norms_over(self, groups: Sequence[Group]) -> ShardNorms:
        """Return the norms of tensors whose parameters are also cut over some groups."""
        cut = {name: [*self.shard_groups.get(name, ()), *groups] for name in self.names}
        return ShardNorms(cut, self.mesh.group("pp"))

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """Gather the pieces of all ranks into the parameters."""
        for bucket in self.buckets:
            for number, values in self._gathered(bucket, self._pieces).items():
                self._values[number].copy_(values)

    def wholes(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield whole parameters from their pieces, bucket by bucket."""
        for bucket in self.buckets:
            found = {self.names[number]: x for number, x in self._gathered(bucket, values).items()}
            yield {name: x for name, x in found.items() if name in values}

    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's pieces."""
        return {name: x.reshape(-1)[self._own_elements[name]] for name, x in values.items()}

    def _gathered(self, bucket: Bucket, pieces: Mapping[str, Tensor]) -> dict[int, Tensor]:
        own = []
        for name in (self.names[number] for number in bucket.numbers):
            piece = pieces.get(name)
            own.append(torch.zeros_like(self._pieces[name]) if piece is None else piece.detach())
        shard = torch.cat([*own, own[0].new_zeros(bucket.length // self.every.ranks - sum(map(len, own)))])
        return self.buckets.split(bucket, self.every.gather(shard))

    def _finish(self, buffers: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Reduce-scatter over the ranks with other samples, into the ``grad`` of the pieces."""
        for shard, spans in zip(self._summed(buffers), self._spans, strict=True):
            for number, (_, inside) in spans.items():
                self._pieces[self.names[number]].grad = shard[inside] if used[number] else None
        for parameter in self._values:
            parameter.grad = AbsentTensor(parameter, _SCATTERED)

    def _start_data(self, ranks: Sharding, flat: Tensor) -> Callable[[], Tensor]:
        """Start the reduce-scatter of this rank's part of a whole buffer."""
        return ranks.start_reduce_scatter(flat[self.sample.own(len(flat))])


class ShardedGradients(ShardedStates):
    """Stage 2: every rank of a sample keeps a shard of its gradient, and adds other samples to the shard."""

    stage = 2

    @cached_property
    def _sample_norms(self) -> ShardNorms:
        """Norms of the shards of a sample's gradient."""
        return self._norms_over(self.sample.groups)

    def squared_norm(self, buffers: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of a sample's gradient, from its shards over the ranks of the sample."""
        return self._sample_norms.total(self._by_name(buffers))

    def _start_sample(self, ranks: Sharding, flat: Tensor) -> Callable[[], Tensor]:
        return ranks.start_reduce_scatter(flat)

    def _start_data(self, ranks: Sharding, flat: Tensor) -> Callable[[], Tensor]:
        return ranks.start_reduce_scatter(flat)

    def _length_of_sample(self, bucket: Bucket) -> int:
        return bucket.length // self.sample.ranks

    def _by_name(self, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
        found: dict[int, Tensor] = {}
        for bucket, flat in zip(self.buckets, buffers, strict=True):
            spans = self.buckets.spans(bucket, self.sample.own(bucket.length))
            found |= {number: flat[inside] for number, (_, inside) in spans.items()}
        return {name: found[number] for number, name in enumerate(self.names)}
