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
from fastfold.parallel.data_parallel.buckets import Bucket, Buckets, EarlyReduction, Sharding, apart
from fastfold.parallel.data_parallel.kept_gradients import BEFORE_REDUCTION, ReducedGradients
from fastfold.parallel.data_parallel.sharded_norm import ShardNorms
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.own_stages import SharedParameter
from fastfold.utils.device import AbsentTensor

_SCATTERED = (
    "under zero=1 and zero=2 each rank has a piece of the gradient; clip with clip_grad_norm_() of the object that "
    "parallelize() returned, and call optimizer.zero_grad() before the next backward()"
)


class Replicated(ReducedGradients):
    """Gradients and optimizer states of ranks that hold the same parameters, at a ZeRO stage from 0 to 2.

    At stage 0 every rank holds all gradients and optimizer states. From stage 1 on each rank's optimizer updates flat
    pieces of the parameters, which share their memory, and the ranks exchange the pieces. At stage 2 every rank of a
    sample keeps a shard of its gradient, and adds other samples to the shard.

    The parameters train, and are this rank's blocks where tensor parallel layers cut them over ``shard_groups``. Those
    in ``shared`` are of several pipeline stages, and only their owner's rank has them in ``parameters``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
        shard_groups: Mapping[str, Sequence[Group]],
        stage: int = 0,
        shared: Sequence[SharedParameter] = (),
    ) -> None:
        super().__init__(parameters, ShardNorms(shard_groups, mesh.group("pp")))
        self.shared = shared
        self.mesh, self.shard_groups, self.stage = mesh, shard_groups, stage
        # Gradients are summed over the innermost group first.
        self.sample = Sharding([mesh.group("dap"), mesh.group("sp")])
        self.data = Sharding([mesh.group("dp")])
        self.every = Sharding([*self.sample.groups, *self.data.groups])
        self._values = list(parameters.values())
        self.buckets = Buckets(self._values, self.every.ranks)
        self._used = [False] * len(self._values)
        self._left: list[TensorWeakRef] = []
        self._early: dict[bool, EarlyReduction | None] = {}
        self._under_way: EarlyReduction | None = None
        self._over_data = False  # True if take_sample() sums over ranks with other samples too
        self._pieces = self.parameters
        if stage:
            # Cut the parameters into pieces of the ranks.
            self._spans = [
                self.buckets.spans(bucket, self.every.own(bucket.length)) for bucket in self.buckets
            ]
            self._own_elements = {
                self.names[number]: own for spans in self._spans for number, (own, _) in spans.items()
            }
            self._pieces = {}
            for name, parameter in self.parameters.items():
                parameter.data = parameter.data.contiguous()
                self._pieces[name] = nn.Parameter(parameter.data.view(-1)[self._own_elements[name]])

    # ---- parameters of the optimizer -----------------------------------------------------------------

    @property
    def followers(self) -> frozenset[int]:
        """Identities of parameters that train and that another pipeline stage's optimizer updates."""
        return frozenset(id(one.parameter) for one in self.shared if not one.is_owner)

    @property
    def optimized(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank's optimizer updates; from stage 1 on pieces ``[n]``, some of them empty."""
        return self._pieces

    @cached_property
    def norms(self) -> ShardNorms:
        """Norms of tensors laid out like :attr:`optimized`."""
        return self._norms_over(self.every.groups) if self.stage else self._norms

    @cached_property
    def _sample_norms(self) -> ShardNorms:
        """Norms of tensors laid out like a sample's gradient."""
        return self._norms_over(self.sample.groups) if self.stage == 2 else self._norms

    def _norms_over(self, groups: Sequence[Group]) -> ShardNorms:
        """Return the norms of tensors whose parameters are also cut over some groups."""
        cut = {name: [*self.shard_groups.get(name, ()), *groups] for name in self.names}
        return ShardNorms(cut, self.mesh.group("pp"))

    @torch.no_grad()
    def all_gather_params(self) -> None:
        for bucket in self.buckets if self.stage else ():
            for number, values in self._gathered(bucket, self._pieces).items():
                self._values[number].copy_(values)
        for one in self.shared:
            one.follow_owner()

    def wholes(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        if not self.stage:
            yield dict(values)
            return
        for bucket in self.buckets:
            tensors = {self.names[number]: x for number, x in self._gathered(bucket, values).items()}
            yield {name: x for name, x in tensors.items() if name in values}

    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.stage:
            return dict(values)
        return {name: x.reshape(-1)[self._own_elements[name]] for name, x in values.items()}

    def _gathered(self, bucket: Bucket, pieces: Mapping[str, Tensor]) -> dict[int, Tensor]:
        own = []
        for name in (self.names[number] for number in bucket.numbers):
            piece = pieces.get(name)
            own.append(torch.zeros_like(self._pieces[name]) if piece is None else piece.detach())
        shard = torch.cat([*own, own[0].new_zeros(bucket.length // self.every.ranks - sum(map(len, own)))])
        return self.buckets.split(bucket, self.every.gather(shard))

    def set_by_user(self) -> dict[str, Tensor]:
        present = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if self.stage:
            return {name: g for name, g in present.items() if not isinstance(g, AbsentTensor)}
        reduced = self._finished or {}
        return {name: g for name, g in present.items() if name not in reduced or g is not reduced[name][0]()}

    def check_step(self) -> None:
        for name, piece in self._pieces.items() if self.stage else ():
            parameter = self.parameters[name]
            memory = parameter.untyped_storage().data_ptr()
            if piece.numel() and piece.untyped_storage().data_ptr() != memory:
                # Pieces follow a parameter to new memory (``.data =``).
                parameter.data = parameter.data.contiguous()
                piece.data = parameter.data.view(-1)[self._own_elements[name]]
        if self._finished is None:
            if self.stage or self.every.ranks > 1 or self._aside:
                raise ConfigError(BEFORE_REDUCTION)
        elif self.stage or any(self.shard_groups.values()) or self.mesh.plan.pp > 1:
            self._check_kept(self._finished)

    def accept_gradients(self) -> None:
        super().accept_gradients()
        self._left = [TensorWeakRef(p.grad) for p in self._values if p.grad is not None]

    def forget_gradients(self) -> None:
        super().forget_gradients()
        for one in self.shared:
            one.parameter.grad = None
        self._over_data = False
        if self._under_way is not None:
            self._under_way.forget()

    def _clear(self) -> None:
        super()._clear()
        self._left = []

    # ---- gradients -------------------------------------------------------------------------------------

    def take_sample(self) -> list[Tensor]:
        if self._under_way is not None:
            early, self._under_way = self._under_way, None
            self._over_data = early is self._early.get(True)
            gradients, numbers = early.take()
            self._used = [used or number in numbers for number, used in enumerate(self._used)]
            self._finished, self._left = None, []
            return gradients
        self._refuse_left()
        for one in self.shared:
            one.sum_gradients()
        self._finished, self._left = None, []
        self._used = [used or p.grad is not None for used, p in zip(self._used, self._values, strict=True)]
        gradients = []
        for bucket in self.buckets:
            flat = self.buckets.join(bucket, [p.grad for p in self._values])
            for number in bucket.numbers:
                self._values[number].grad = None
            gradients.append(self._start_sample(self.sample, flat)())
        return gradients

    def _refuse_left(self) -> None:
        left = {id(gradient) for kept in self._left if (gradient := kept()) is not None}
        if any(id(p.grad) in left for p in self._values):
            raise ConfigError(
                "the gradients of the last step were not cleared: call optimizer.zero_grad() before backward()"
            )

    @contextmanager
    def overlapped(self, *, data: bool = False) -> Iterator[None]:
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
        ranks = self.sample.ranks if self.stage == 2 else 1
        return [self._values[bucket.numbers[0]].new_zeros(bucket.length // ranks) for bucket in self.buckets]

    def squared_norm(self, buffers: Sequence[Tensor]) -> Tensor:
        parts: dict[int, Tensor] = {}
        for bucket, flat in zip(self.buckets, buffers, strict=True):
            if self.stage == 2:
                spans = self.buckets.spans(bucket, self.sample.own(bucket.length))
                parts |= {number: flat[inside] for number, (_, inside) in spans.items()}
            else:
                parts |= self.buckets.split(bucket, flat)
        return self._sample_norms.total({name: parts[number] for number, name in enumerate(self.names)})

    def _finish(self, buffers: Sequence[Tensor]) -> None:
        used = self._used_anywhere()
        for place, (bucket, total) in enumerate(zip(self.buckets, self._summed(buffers), strict=True)):
            if self.stage:
                gradients = {number: total[inside] for number, (_, inside) in self._spans[place].items()}
            else:
                gradients = self.buckets.split(bucket, total)
            for number, gradient in gradients.items():
                self._pieces[self.names[number]].grad = gradient if used[number] else None
        for parameter in self._values if self.stage else ():
            parameter.grad = AbsentTensor(parameter, _SCATTERED)

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
        return ranks.start_reduce_scatter(flat) if self.stage == 2 else ranks.start_all_reduce(flat)

    def _start_data(self, ranks: Sharding, flat: Tensor) -> Callable[[], Tensor]:
        if not self.stage:
            return ranks.start_all_reduce(flat)
        # At stage 1 this rank reduces its part of a whole buffer.
        return ranks.start_reduce_scatter(flat[self.sample.own(len(flat))] if self.stage == 1 else flat)
