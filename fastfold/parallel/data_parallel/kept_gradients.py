"""Reduced gradients of an optimizer's parameters: recorded to detect changes by other code, and averaged.

Gradients are averaged at the end of every backward pass, as DistributedDataParallel does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fastfold.errors import ConfigError
from fastfold.parallel.checks.agreement import StepAgreement
from fastfold.parallel.data_parallel.sharded_norm import ShardNorms, local
from fastfold.parallel.turns import take_turn
from fastfold.utils.module_structure import tensors_in

Kept = dict[str, tuple[TensorWeakRef, int]]  #: A gradient and its version, by name

BEFORE_REDUCTION = (
    "optimizer.step() before the gradients were summed over the ranks: call reduce_gradients() after backward() "
    "and before step(); after parallel(...) run the last backward() outside of no_sync()"
)


def changed_message(name: str) -> str:
    """Return the message about a gradient that was changed by a function that sees only a part of it."""
    return (
        f"the gradient of {name} changed after reduce_gradients(), and this rank has only a part of it; clip with "
        "clip_grad_norm_() of the object that parallelize() returned, and scale the loss"
    )


@torch.no_grad()
def keep_gradients(parameters: Mapping[str, nn.Parameter]) -> Kept:
    """Record the present gradients of parameters."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return {name: (TensorWeakRef(gradient), local(gradient)._version) for name, gradient in gradients.items()}


@torch.no_grad()
def is_kept(gradient: Tensor | None, kept: tuple[TensorWeakRef, int] | None) -> bool:
    """Return True if a gradient is the recorded one, unchanged."""
    if gradient is None or kept is None:
        return gradient is None and kept is None
    return gradient is kept[0]() and local(gradient)._version == kept[1]


class ReducedGradients(ABC):
    """Gradients of an optimizer's parameters after their sum over the ranks; base of all ZeRO stages.

    Norms are those of tensors laid out like :attr:`optimized`.
    """

    stage: int  #: ZeRO stage from 0 to 3

    def __init__(self, parameters: Mapping[str, nn.Parameter], norms: ShardNorms) -> None:
        self.agreement: StepAgreement | None = None
        self.parameters, self.names = dict(parameters), list(parameters)
        self._norms = norms
        self._finished: Kept | None = None
        self._aside: dict[str, Tensor] = {}
        self._kinds = {name: (p.shape, p.dtype, p.device) for name, p in parameters.items()}

    @property
    def followers(self) -> frozenset[int]:
        """Identities of parameters that train and that another pipeline stage's optimizer updates."""
        return frozenset()

    @property
    def optimized(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank's optimizer updates, by name."""
        return self.parameters

    @property
    def norms(self) -> ShardNorms:
        """Norms of tensors laid out like :attr:`optimized`."""
        return self._norms

    @abstractmethod
    def all_gather_params(self) -> None:
        """Give every rank all parameters after the optimizer's step."""

    @abstractmethod
    def wholes(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield :meth:`whole` for some tensors at a time."""

    @abstractmethod
    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors in the shapes of this rank's parameters to the layout of :attr:`optimized`."""

    @abstractmethod
    def take_sample(self) -> list[Tensor]:
        """Return the gradient of the sample, summed over the ranks that worked on it (a collective).

        The buffers may be scaled and added to those of another sample. The parameters' ``grad`` is None afterwards.

        Raises:
            ConfigError: The gradients of the last step were not cleared, and this sample's were added to them.
        """

    @abstractmethod
    def overlapped(self, *, data: bool = False) -> AbstractContextManager[None]:
        """Sum gradients during the last backward pass before :meth:`take_sample`.

        The early sum is over the ranks of one sample. If a sample has one rank, only ``data=True`` starts a sum early:
        the caller promises to pass the result of :meth:`take_sample` to :meth:`finish` unchanged, so that the sum may
        be the one over ranks with other samples.

        Raises:
            ConfigError: The gradients of the last step were not cleared, or other backward passes interfere.
        """

    @abstractmethod
    def zeros(self) -> list[Tensor]:
        """Return the result of :meth:`take_sample` for a gradient of zeros."""

    @abstractmethod
    def squared_norm(self, buffers: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of a sample's gradient, a scalar; a collective where it is sharded."""

    @abstractmethod
    def check_step(self) -> None:
        """Refuse a step whose gradients are not those of :meth:`finish`.

        Raises:
            ConfigError: Gradients were not summed over the ranks since the last step, or a function that sees only this
                rank's part changed them.
        """

    @abstractmethod
    def _finish(self, buffers: Sequence[Tensor]) -> None: ...

    def finish(self, buffers: Sequence[Tensor]) -> None:
        """Sum over ranks with other samples into ``grad`` of the optimizer's parameters (a collective).

        Parameters that no rank used get None.

        Raises:
            ConfigError: Under stage 3 ranks used different parameters in one backward pass. FSDP2 packs a rank's
                gradients into one message, so gradients of different parameters were summed.
        """
        self._finish(buffers)
        if self.agreement is not None:
            self.agreement.check({name: p.grad for name, p in self.optimized.items()})
        self.accept_gradients()

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors laid out like :attr:`optimized` to this rank's parameters' shapes (a collective)."""
        tensors = {name: x for part in self.wholes(values) for name, x in part.items()}
        return {name: tensors[name] for name in self.names if name in tensors}

    def check_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Refuse a parameter that replaced the one that the optimizer steps.

        Raises:
            ConfigError: It is another object, or its dtype, shape or device differs.
        """
        kind = parameter.shape, parameter.dtype, parameter.device
        if self._kinds[name][2].type == "meta" and kind != self._kinds[name]:
            raise ConfigError(
                f"{name} had no data (device meta) when parallelize() applied the plan, so ranks share nothing of it; "
                "call to_empty() and initialise the model first, and parallelize() after that, or give initialize="
            )
        if parameter is not self.parameters[name] or kind != self._kinds[name]:
            raise ConfigError(
                f"{name} was replaced after parallelize(), and its optimizer would not step the new tensor; call "
                "load_state_dict() of the object that parallelize() returned instead of passing assign=True, and "
                "convert or move the model before parallelize()"
            )

    @abstractmethod
    def set_by_user(self) -> dict[str, Tensor]:
        """Return gradients that other code has put in place of reduced ones, by name.

        Raises:
            ConfigError: The stage cannot reduce them.
        """

    def average_set_by_user(self, share: float) -> None:
        """Average gradients that other code has set over the ranks (a collective if there are any).

        All ranks set those of the same parameters, as they run one program. ``share`` multiplies each rank's gradient.
        A gradient that was set to None stays None.
        """
        if self._finished is None:
            return
        removed = [n for n, p in self.optimized.items() if self.parameters[n].grad is None is not p.grad]
        for name in removed:
            self.optimized[name].grad = None
        new = self.set_by_user()
        if new:
            reduced = {name: p.grad for name, p in self.optimized.items() if name not in new}
            self._clear()
            for name, gradient in new.items():
                self.parameters[name].grad = gradient
            buffers = self.take_sample()
            with torch.no_grad():
                for buffer in buffers:
                    buffer.mul_(share)
            self.finish(buffers)
            for name, of_backward in reduced.items():
                self.optimized[name].grad = of_backward
        if new or removed:
            self.accept_gradients()

    def _check_kept(self, kept: Kept) -> None:
        """Refuse gradients that were changed by a function that sees only a part of them."""
        for name, parameter in self.optimized.items():
            if not is_kept(parameter.grad, kept.get(name)):
                raise ConfigError(changed_message(name))

    def gradient_square(self) -> Tensor:
        """Return the squared norm of the whole model's reduced gradient (a collective)."""
        return self.norms.total({name: p.grad for name, p in self.optimized.items()})

    @property
    def is_reduced(self) -> bool:
        """True if the gradients are those of :meth:`accept_gradients`."""
        return self._finished is not None

    def accept_gradients(self) -> None:
        """Accept the present gradients of :attr:`optimized` as those of the step."""
        self._finished = keep_gradients(self.optimized)

    def forget_gradients(self) -> None:
        """Clear the gradients of the parameters and of this rank's shards of them."""
        self._clear()
        self._aside = {}

    def _clear(self) -> None:
        for parameter in (*self.parameters.values(), *self.optimized.values()):
            parameter.grad = None
        self._finished = None

    def set_aside(self) -> None:
        """Store reduced gradients before another backward pass; :meth:`add_set_aside` adds them."""
        if self._finished is None:
            return
        kept = {n: p.grad for n, p in self.optimized.items() if self.parameters[n].grad is not None}
        self._clear()
        self._aside = {name: gradient for name, gradient in kept.items() if gradient is not None}

    def add_set_aside(self) -> None:
        """Add the gradients of earlier backward passes to those of the last one."""
        if self._aside:
            with torch.no_grad():
                for name, gradient in self._aside.items():
                    parameter = self.optimized[name]
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self._aside = {}
            self.accept_gradients()


class BackwardReduction:
    """Averages gradients over the ranks when a backward pass through watched outputs ends.

    ``share``, one divided by the number of losses, multiplies each rank's gradient. ``has_reduced`` is True if any
    backward pass has reduced gradients.
    """

    def __init__(self, gradients: ReducedGradients, share: float) -> None:
        self._gradients, self._share = gradients, share
        self._is_paused = self._is_running = self.has_reduced = False
        self._overlap = ExitStack()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Skip reduction in backward passes inside the context; later ones add to their gradients."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def average_set_by_user(self) -> None:
        """Average gradients that other code has set; see :meth:`ReducedGradients.average_set_by_user`."""
        self._gradients.average_set_by_user(self._share)

    @torch.compiler.disable
    def watch(self, output: Any) -> None:
        """Reduce gradients at the end of backward passes that begin at an output."""
        if torch._C._current_graph_task_id() != -1:  # a forward pass that checkpoint() runs again
            return
        if self._is_running:  # an exception ended the last backward pass
            self._is_running = False
            self._overlap = ExitStack()
        for x in tensors_in(output):
            if x.requires_grad:
                x.register_hook(self._begin)

    def _begin(self, _: Tensor) -> None:
        if self._is_running:
            return
        self._gradients.set_aside()
        if self._is_paused:
            return
        take_turn("backward()")
        self._is_running = True
        self._overlap.enter_context(self._gradients.overlapped(data=True))
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._is_running = False
        self._overlap.close()
        buffers = self._gradients.take_sample()
        with torch.no_grad():
            for buffer in buffers:
                buffer.mul_(self._share)
        self._gradients.finish(buffers)
        self.has_reduced = True
        self._gradients.add_set_aside()
