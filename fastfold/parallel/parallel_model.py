"""A model under a plan: data, gradients, optimizer and state of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.data_parallel.flat_pieces import Factory, on_pieces
from fastfold.parallel.data_parallel.fsdp import FullySharded
from fastfold.parallel.data_parallel.full_state import FullStateDict
from fastfold.parallel.data_parallel.optimizer import ParallelOptimizer
from fastfold.parallel.data_parallel.sharded_norm import whole
from fastfold.parallel.data_parallel.sharded_state import ShardedStateDict
from fastfold.parallel.data_parallel.zero import Replicated
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.layout import layouts


class Parallel:
    """A model under a plan; made by :func:`fastfold.parallel.parallelize`.

    All ranks call its methods together.

    The gradient that the optimizer sees is that of the **sum of all ranks' losses**. For the mean over a batch that
    lies on several ranks, multiply each rank's mean by :meth:`loss_share`.

    Attributes:
        module: This rank's part of the model. With pipeline stages: an ``nn.ModuleDict`` of this rank's stages.
        mesh: The ranks.
        plan: The mesh's plan.
        gradients: How gradients are added up and what of them is kept, by ZeRO stage.
        sequence: What puts sequence parallelism into the model, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        gradients: Replicated | FullySharded,
        full_state: FullStateDict,
        *,
        sequence: Any = None,
    ) -> None:
        self.module, self.mesh, self.plan = module, mesh, mesh.plan
        self.gradients = gradients
        self._full_state = full_state
        self._sharded_state = ShardedStateDict(full_state)
        self.sequence = sequence

    # ---- data and loss ---------------------------------------------------------------------------------

    def _batch_groups(self) -> tuple[Group, ...]:
        """Groups over which a batch is split, the outermost first."""
        return (self.mesh.group("dp"), *layouts(self.mesh)[0].rows)

    def rows(self, count: int) -> slice:
        """Which rows this rank takes of a batch of ``count`` that all ranks know.

        The batch is split over ``dp``, and over the rows of a 2d, 2.5d or 3d tensor parallel grid; ranks of one
        ``sp``, ``dap``, ``pp`` or 1d ``tp`` group take the same rows.
        """
        start = 0
        for group in self._batch_groups():
            sizes = shard_sizes(count, group.size)
            start += sum(sizes[: group.rank])
            count = sizes[group.rank]
        return slice(start, start + count)

    def loss_share(self, count: float) -> float:
        """What to multiply a rank's mean loss by, for the sum over ranks to be the mean over the whole batch.

        Args:
            count: What this rank's loss is a mean over (samples, tokens); may differ between ranks.

        Returns:
            ``count`` divided by its sum over all ranks whose losses count: those with other samples or another part of
            the sequence, and those of a ``dap`` group, which each compute the loss of one protein.
        """
        total = torch.tensor([float(count)], dtype=torch.float64, device=self._device())
        for group in (*self._batch_groups(), self.mesh.group("sp"), self.mesh.group("dap")):
            if group.size > 1:
                total = async_ops.start_all_reduce(total, group).wait()
        return count / max(float(total), 1e-300)

    # ---- gradients and optimizer -----------------------------------------------------------------------

    def overlapped(self) -> AbstractContextManager[None]:
        """Inside runs the last backward pass before :meth:`reduce_gradients`: gradients are summed while it runs.

        Earlier backward passes, whose gradients are added to, run outside. Activation checkpointing inside needs
        ``use_reentrant=False``.

        Raises:
            ConfigError: Another backward pass interferes; or the plan has pipeline stages, whose backward pass is one
                for each micro-batch.
        """
        if self.plan.pp > 1:
            raise ConfigError(
                f"pp={self.plan.pp} has a backward pass for each micro-batch, and all add to the same gradients: leave "
                "overlapped() out"
            )
        return self.gradients.overlapped(data=True)

    def reduce_gradients(self) -> None:
        """After the backward passes of a step: sum the gradients over the ranks that hold the same parameters."""
        self.gradients.finish(self.gradients.take_sample())

    def clip_grad_norm_(self, max_norm: float) -> float:
        """After :meth:`reduce_gradients`: scale the gradient down to a norm, that of the whole model on all ranks.

        PyTorch's function of this name sees what this rank has of the gradient, which under ZeRO 2 is nothing.

        Args:
            max_norm: Largest norm of the whole gradient.

        Returns:
            Its norm before.
        """
        norm = float(self.gradients.gradient_square().sqrt())
        if norm > max_norm:
            for parameter in self.gradients.optimised.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(max_norm / norm)
            self.gradients.accept_gradients()
        return norm

    def optimizer(self, factory: Factory) -> ParallelOptimizer:
        """An optimizer of the plan.

        Args:
            factory: Makes it of the parameters by name, in their own shapes. For example
                ``lambda named: torch.optim.Adam(named.values(), lr=1e-3)`` or ``Lamb``.

        Raises:
            ConfigError: Under ZeRO 1 and 2, whose ranks step flat pieces of the parameters: the optimizer looks at
                whole parameters, as Adafactor and Muon do.
        """
        pieces, parameters = self.gradients.optimised, self.gradients.parameters
        inner = factory(parameters) if pieces is parameters else on_pieces(factory, parameters, pieces)
        return ParallelOptimizer(inner, self.module, self.gradients, self._full_state)

    # ---- state -----------------------------------------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """The plain model's parameters and buffers, whatever the plan.

        Args:
            rank0_only: Rank 0 alone gets them, as copies in host memory, and the others an empty dict; no other rank
                and no device holds more than its own part and one tensor. Otherwise every rank gets them.
        """
        if not rank0_only:
            return self.plain(self.module.state_dict())
        is_rank_zero = not dist.is_initialized() or dist.get_rank() == 0
        found: dict[str, Tensor] = {}
        for name, x in self._full_state.one_by_one(self.sharded_state_dict()):
            if is_rank_zero:
                found[name] = x.detach().to("cpu", copy=True)
            del x  # before the next is made
        return found

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """:meth:`state_dict` for ``torch.distributed.checkpoint``, of which no rank ever holds the whole.

        Under tensor parallelism and ZeRO a rank has slices of the tensors, as DTensors; of a pipeline it has those of
        its stage. ``dcp.save`` writes them and ``dcp.load`` fills them, whatever plan wrote the checkpoint; then
        :meth:`load_state_dict` takes them.
        """
        return self.sharded(self.module.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a plain state; any plan's :meth:`state_dict` is one, and the plan's own :meth:`sharded_state_dict`.

        Raises:
            ConfigError: Names or shapes are not the model's, or the state has more than the model.
        """
        unknown = sorted(set(state) - set(self._full_state.names))
        if unknown:
            raise ConfigError(f"the model has no {unknown[0]}, which the state has; is it another model's?")
        kept = self.module.state_dict(keep_vars=True)
        own = self.shard(state)
        for name, x in kept.items():
            if name not in own:
                raise ConfigError(f"the state has no {name}")
            if own[name].shape != x.shape:
                raise ConfigError(f"{name} is {tuple(own[name].shape)}, this model's is {tuple(x.shape)}")
        with torch.no_grad():
            for name, x in kept.items():
                x.copy_(own[name])

    def plain(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the plain model, of ones that lie like the module's parameters (an average of them, say).

        Args:
            values: By the names of :attr:`module`.
        """
        found = {name: whole(x) for name, x in values.items()}
        return self._full_state.plain(found)

    def sharded(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As :meth:`plain`, but this rank's slices of this stage's tensors; see :meth:`sharded_state_dict`.

        Args:
            values: By the names of :attr:`module`.
        """
        return self._sharded_state.cut(list(values), ({name: whole(x)} for name, x in values.items()))

    def shard(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undoes :meth:`plain` and :meth:`sharded`.

        Args:
            values: By the plain model's names.
        """
        found: dict[str, Tensor] = {}
        for names in self._full_state.joined_together(values):
            own = self._full_state.shard({name: whole(values[name]) for name in names})
            if isinstance(self.gradients, FullySharded):
                own = self.gradients.part(own)
            found |= own
        return found

    def _device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))
