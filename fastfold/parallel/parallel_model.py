"""A model under a plan: data, gradients, optimizer and state of this rank."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastfold.errors import ConfigError, first_line, is_raised_in
from fastfold.parallel.checks.stages import StageComparison
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group, nested_shard
from fastfold.parallel.data_parallel.full_state import FullStateDict
from fastfold.parallel.data_parallel.kept_gradients import BackwardReduction, ReducedGradients
from fastfold.parallel.data_parallel.optimizer import (
    Factory,
    ParallelOptimizer,
    check_cut,
    clip_norm,
    is_stepping,
    on_pieces,
)
from fastfold.parallel.data_parallel.sharded_norm import whole
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.layout import layouts, parameter_shard_specs
from fastfold.parallel.turns import take_turn


class Parallel(nn.Module):
    """A model under a plan; made by :func:`fastfold.parallel.parallelize`.

    It is called as the model is, and passes on the model's other attributes. Gradients of a backward pass through
    ``parallel(...)`` are averaged over the ranks when the pass ends, as by DistributedDataParallel. After a pass
    through :attr:`module`, :meth:`reduce_gradients` computes the gradient of the **sum of all ranks' losses**. For the
    mean over a batch on several ranks, multiply each rank's mean by :meth:`loss_share`.

    All ranks call its methods together.

    Attributes:
        module: This rank's part of the model. With pipeline stages: an ``nn.ModuleDict`` of this rank's stages.
        mesh: The ranks.
        plan: The mesh's plan.
        gradients: Reduction and storage of gradients, by ZeRO stage.
        sequence: Sequence parallelism of the model, or None.
        explanation: Reasons of a plan that was chosen by the cost model; else empty.
        passes: Backward passes of a step whose gradients add up, as the cost model chose them; else 1.
        stage_comparison: Comparison of a pipeline's stages before its first step, or None.

    Example:
        >>> import torch
        >>> from fastfold.parallel import parallelize, started_processes
        >>> model = torch.nn.Linear(4, 2)
        >>> parallel = parallelize(model, {"dp": started_processes()})
        >>> own = parallel.rows(8)  # of a batch of eight
        >>> parallel(torch.ones(8, 4)[own]).shape, parallel.loss_share(own.stop - own.start)
        (torch.Size([8, 2]), 1.0)
        >>> sorted(parallel.state_dict()) == sorted(model.state_dict())
        True
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        gradients: ReducedGradients,
        full_state: FullStateDict,
        *,
        sequence: Any = None,
        explanation: str = "",
        passes: int = 1,
        stage_comparison: StageComparison | None = None,
    ) -> None:
        super().__init__()
        self.module, self.mesh, self.plan = module, mesh, mesh.plan
        self.gradients = gradients
        self._full_state = full_state
        self.sequence, self.explanation, self.passes = sequence, explanation, passes
        self.stage_comparison = stage_comparison
        self.training = module.training
        losses = math.prod(group.size for group in self._loss_groups())
        self._backward = BackwardReduction(gradients, 1 / losses)
        # Accelerate would put DistributedDataParallel around the model.
        self._is_accelerate_prepared = True
        # Libraries read the names of a model's arguments. A weak reference, so that the model is freed at once.
        call: Any = weakref.WeakMethod(self.forward)

        @functools.wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return call()(*args, **kwargs)

        self.forward = forward  # type: ignore[method-assign]
        if self.plan.ranks > 1:
            for parameter in module.parameters():
                parameter.fastfold_plan = str(self.plan)  # type: ignore[attr-defined]
            _refuse_foreign_optimizers()

    # ---- nn.Module -------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; a backward pass through its results averages gradients over the ranks.

        Raises:
            ConfigError: The plan has pipeline stages.
        """
        if self.plan.pp > 1:
            raise ConfigError(
                f"pp={self.plan.pp} has no forward pass on one rank: run steps by fastfold.parallel.Pipeline(parallel)"
            )
        if self.plan.zero == 3:
            if torch.is_inference_mode_enabled():
                # FSDP2 keeps tensors of its first pass, which passes with gradients use too.
                with torch.inference_mode(False), torch.no_grad():
                    return Parallel.forward(self, *args, **kwargs)
            take_turn("forward()")
        try:
            output = self.module(*args, **kwargs)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            known = async_ops.is_lost(error) or isinstance(error, torch.OutOfMemoryError)
            if self.plan.zero == 3 and not known and is_raised_in(error, "torch.distributed.fsdp"):
                rank = self.mesh.group("replicas").rank
                raise ConfigError(
                    f"zero=3 fails in forward on rank {rank} ({type(error).__name__}: {first_line(error)}): use zero=2"
                ) from error
            raise
        if torch.is_grad_enabled():
            self._backward.watch(output)
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes add up gradients on this rank alone; the last runs outside."""
        return self._backward.paused()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by the names of :attr:`module`."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers by the names of :attr:`module`."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters and of this rank's share; they are None afterwards."""
        self.gradients.forget_gradients()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Parallel:
        """Refuse to move or convert parameters, which other tensors share."""
        for name, x in (*self.named_parameters(), *self.named_buffers()):
            with torch.no_grad():
                converted = fn(x)
            if (converted.dtype, converted.device) != (x.dtype, x.device):
                raise ConfigError(
                    f"{name} is {x.dtype} on {x.device}, and cannot become {converted.dtype} on {converted.device} "
                    "under a plan: convert or move the model before parallelize()"
                )
        return self

    def __deepcopy__(self, memo: Any) -> Parallel:
        raise ConfigError(
            "a model under a plan cannot be copied: copy the plain model before parallelize(), or load state_dict() "
            "into another plain model"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Names that DistributedDataParallel reads first; refuse it here."""
        raise ConfigError(
            f"the model has a plan ({self.plan}) and reduces its gradients itself: leave DistributedDataParallel out"
        )

    # ---- data and loss ---------------------------------------------------------------------------------

    def _batch_groups(self) -> tuple[Group, ...]:
        """Return the groups over which a batch is split, the outermost first."""
        return (self.mesh.group("dp"), *layouts(self.mesh)[0].rows)

    def _loss_groups(self) -> tuple[Group, ...]:
        """Return the groups whose ranks each compute a loss that counts."""
        return (*self._batch_groups(), self.mesh.group("sp"), self.mesh.group("dap"))

    def rows(self, count: int) -> slice:
        """Return this rank's rows of a batch of ``count`` rows.

        The batch is split over ``dp``, and over the rows of a 2d, 2.5d or 3d tensor parallel grid; ranks of one
        ``sp``, ``dap``, ``pp`` or 1d ``tp`` group take the same rows.
        """
        return nested_shard(count, self._batch_groups())

    def loss_share(self, count: float) -> float:
        """Return the factor of a rank's mean loss that makes the sum over ranks the mean over the batch.

        It is ``count``, the number of samples or tokens in this rank's mean, divided by its sum over all ranks whose
        losses count: those with other samples or another part of the sequence, and those of a ``dap`` group, which each
        compute the loss of one protein.
        """
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        total = torch.tensor([float(count)], dtype=torch.float64, device=device)
        for group in self._loss_groups():
            total = async_ops.start_all_reduce(total, group).wait()
        return count / max(float(total), 1e-300)

    # ---- gradients and optimizer -----------------------------------------------------------------------

    def overlapped(self) -> AbstractContextManager[None]:
        """Sum gradients during the last backward pass before :meth:`reduce_gradients`.

        Earlier backward passes, whose gradients it adds to, run outside. Activation checkpointing inside needs
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
        """Sum the gradients over ranks with the same parameters, after the backward passes of a step.

        Raises:
            ConfigError: The backward pass ran through ``parallel(...)``, which has averaged them.
        """
        if self._backward.has_reduced and self.gradients.is_reduced:
            raise ConfigError(
                "the gradients are already averaged over the ranks: after parallel(...) leave out reduce_gradients() "
                "and loss_share(), or call parallel.module(...); call zero_grad() before the next step"
            )
        take_turn("reduce_gradients()")
        self.gradients.finish(self.gradients.take_sample())

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the whole model's gradient down to ``max_norm``, after :meth:`reduce_gradients`.

        PyTorch's function of this name sees only this rank's part of the gradient, which is empty under ZeRO 2.
        Returns the norm before.
        """
        return clip_norm(self.gradients, max_norm)

    def optimizer(self, factory: Factory) -> ParallelOptimizer:
        """Create an optimizer of the plan, by a factory of the parameters by name, in their own shapes.

        For example, the factory is ``lambda named: torch.optim.Adam(named.values(), lr=1e-3)`` or ``Lamb``.

        Raises:
            ConfigError: The optimizer looks at whole parameters, as Adafactor and Muon do, and under ZeRO 1 and 2
                ranks step flat pieces of them, or under ``tp`` the parts of cut layers. Or it calls a closure several
                times in a step, as LBFGS does.
        """
        pieces, parameters = self.gradients.optimized, self.gradients.parameters
        inner = factory(parameters) if pieces is parameters else on_pieces(factory, parameters, pieces)
        cut = [name for name, specs in parameter_shard_specs(self.module).items() if specs]
        check_cut(inner, factory, parameters, cut)
        closure = inspect.signature(type(inner).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(inner).__name__} decides by the loss of a closure, and each rank has its own; use an "
                "optimizer whose step() needs no closure, such as AdamW"
            )
        return ParallelOptimizer(inner, self.module, self.gradients, self._full_state, self._backward)

    # ---- state -----------------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        rank0_only: bool = False,
    ) -> dict[str, Tensor]:
        """Return the plain model's parameters and buffers, whatever the plan.

        Args:
            destination: Filled and returned, as by PyTorch's modules.
            prefix: Prefix of each name.
            keep_vars: Accepted as by PyTorch's modules; tensors are detached.
            rank0_only: True to return copies in host memory on rank 0, and an empty dict on the others. Then each
                other rank and device holds at most its own part and one tensor. False to return tensors on every rank.
        """
        if (
            self.plan.zero == 3 or self.plan.tp > 1 or self.plan.pp > 1
        ):  # parameters are in parts on the ranks
            take_turn("state_dict()")
        tensors: dict[str, Tensor] = {}
        if not rank0_only:
            tensors = self.plain(self.module.state_dict())
        else:
            is_rank_zero = not dist.is_initialized() or dist.get_rank() == 0
            for name, x in self._full_state.one_by_one(self.sharded_state_dict()):
                if is_rank_zero:
                    tensors[name] = x.detach().to("cpu", copy=True)
                del x  # released before the next is made
        if destination is None and not prefix:
            return tensors
        destination = {} if destination is None else destination
        destination.update({prefix + name: x for name, x in tensors.items()})
        return destination

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Return :meth:`state_dict` for ``torch.distributed.checkpoint``; no rank ever holds the whole.

        Under tensor parallelism and ZeRO a rank has slices of the tensors, as DTensors; of a pipeline it has those of
        its stage. ``dcp.save`` writes them. ``dcp.load`` fills them from a checkpoint of any plan; then
        :meth:`load_state_dict` takes them.
        """
        return self.sharded(self.module.state_dict())

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load a plain state, such as any plan's :meth:`state_dict`, or this plan's :meth:`sharded_state_dict`.

        Args:
            state_dict: By the plain model's names.
            strict: True to refuse missing and unknown names; otherwise they are returned.
            assign: Refused, since optimizers and messages refer to the present tensors.

        Raises:
            ConfigError: Names or shapes are not the model's.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) would replace tensors that the plan uses: leave assign out"
            )
        unknown = sorted(set(state_dict) - set(self._full_state.names))
        if unknown and strict:
            raise ConfigError(
                f"the state has {unknown[0]}, which is not in the model; load a state of the same model"
            )
        kept = self.module.state_dict(keep_vars=True)
        own = self.shard({name: x for name, x in state_dict.items() if name not in unknown})
        missing = [name for name in kept if name not in own]
        if missing and strict:
            raise ConfigError(
                f"the state lacks {missing[0]}; load a state of the same model, or pass strict=False"
            )
        for name in own:
            if own[name].shape != kept[name].shape:
                raise ConfigError(
                    f"{name}: expected shape {tuple(kept[name].shape)}, found {tuple(own[name].shape)}"
                )
        with torch.no_grad():
            for name in own:
                kept[name].copy_(own[name])
        if self.gradients.agreement is not None:
            self.gradients.agreement.accept_equal_parts()
        return _IncompatibleKeys(missing, unknown)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a plain state for a module around this one; its ``load_state_dict()`` continues to :attr:`module`."""
        plain = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
        missing, unknown = self.load_state_dict(plain, strict=False)
        missing_keys.extend(prefix + name for name in missing)
        unexpected_keys.extend(prefix + name for name in unknown)
        for name in plain:
            del state_dict[prefix + name]
        for name, x in self.module.state_dict().items():
            state_dict[f"{prefix}module.{name}"] = x

    def plain(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return plain tensors from ones laid out like the module's parameters (such as their average).

        Values are by the names of :attr:`module`.
        """
        wholes = {name: whole(x) for name, x in values.items()}
        return self._full_state.plain(wholes)

    def sharded(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's slices of this stage's plain tensors; see :meth:`sharded_state_dict`.

        Values are by the names of :attr:`module`.
        """
        return self._full_state.cut(list(values), ({name: whole(x)} for name, x in values.items()))

    def shard(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors laid out like the module's parameters, from :meth:`plain` or :meth:`sharded`.

        Values are by the plain model's names.
        """
        shards: dict[str, Tensor] = {}
        for names in self._full_state.joined_together(values):
            own = self._full_state.shard({name: whole(values[name]) for name in names})
            if self.gradients.stage == 3:
                own = self.gradients.part(own)
            shards |= own
        return shards


@functools.cache
def _refuse_foreign_optimizers() -> None:
    """Make every optimizer's step refuse parameters under a plan that another optimizer has to step."""
    register_optimizer_step_pre_hook(_refuse_foreign_step)


def _refuse_foreign_step(optimizer: Optimizer, *_: Any) -> None:
    if isinstance(optimizer, ParallelOptimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            plan = getattr(parameter, "fastfold_plan", None)
            if plan is not None and not is_stepping(parameter):
                raise ConfigError(
                    f"{type(optimizer).__name__} has parameters of a model under a plan ({plan}): create it by a "
                    "call such as parallel.optimizer(lambda named: torch.optim.AdamW(named.values()))"
                )
