"""An optimizer for any plan: it steps this rank's share, and its state reads and writes as a plain one.

ZeRO 1 and 2 leave flat pieces on a rank, to which :func:`on_pieces` applies optimizers of whole parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError, first_line, is_raised_in
from fastfold.parallel.data_parallel.full_state import FullStateDict
from fastfold.parallel.data_parallel.kept_gradients import BackwardReduction, ReducedGradients
from fastfold.parallel.data_parallel.large_batch import (
    LayerwiseOptimizer,
    has_known_state,
    initialize_state,
)
from fastfold.parallel.data_parallel.param_groups import ParamGroup, named_groups, restore_groups
from fastfold.parallel.data_parallel.sharded_norm import local, whole
from fastfold.utils.lazy import old_attributes

State = dict[str, dict[str, Tensor]]  #: Tensors of each parameter's state, by names and keys


class OptimizerState(TypedDict):
    """State of an optimizer by the plain model's names, as PyTorch's distributed state dicts have it."""

    state: State
    param_groups: list[ParamGroup]


_stepping: ContextVar[frozenset[int]] = ContextVar("stepping", default=frozenset())
"""Identities of the parameters whose :class:`ParallelOptimizer` takes a step."""


def is_stepping(parameter: nn.Parameter) -> bool:
    """Return True while the parallel optimizer of a parameter takes a step."""
    return id(parameter) in _stepping.get()


@old_attributes({"initialise": "initialize"})
class ParallelOptimizer(Optimizer):
    """Optimizer from :meth:`fastfold.parallel.Parallel.optimizer`; learning rate schedules accept it.

    ``inner`` is the optimizer of this rank's share; its ``param_groups`` hold learning rates.

    Example:
        >>> import torch
        >>> from fastfold.parallel import parallelize, started_processes
        >>> parallel = parallelize(torch.nn.Linear(4, 2), {"dp": started_processes()})
        >>> optimizer = parallel.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.5))
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        >>> parallel(torch.ones(3, 4)).sum().backward()
        >>> _ = optimizer.step()
        >>> schedule.step()
        >>> optimizer.param_groups[0]["lr"]
        0.25
    """

    def __init__(
        self,
        inner: Optimizer,
        module: nn.Module,
        stage: ReducedGradients,
        full_state: FullStateDict,
        backward: BackwardReduction,
    ) -> None:
        # Parameters and states belong to the inner optimizer, so only defaults and hooks are made here.
        self.__setstate__({"defaults": inner.defaults})
        self.inner, self._module = inner, module
        self._stage, self._full_state, self._backward = stage, full_state, backward
        if isinstance(inner, LayerwiseOptimizer):
            inner.norms = stage.norms

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the inner optimizer, by this rank's share of each parameter."""
        return self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: gradients of other parameters would not be summed over the ranks.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "cannot add a parameter group; create all groups in the factory that parallel.optimizer() receives"
        )

    def step(self, closure: Callable[[], Any] | None = None, *, ok: Tensor | None = None) -> Any:
        """Update all parameters on all ranks (a collective where states are sharded).

        Gradients that were set after the last backward pass (``p.grad = g``) are averaged over the ranks first, as
        those of a backward pass are.

        Args:
            closure: Computes the loss and its gradients, as for PyTorch's optimizers.
            ok: A boolean scalar on the device, the same on all ranks: True if the step takes place. The host does not
                wait for it. None for a step that always takes place.

        Returns:
            The closure's loss. Without a closure: a function that restores counters on the host. Call it before the
            next step if this one was cancelled.

        Raises:
            ConfigError: The gradients are not those that were summed over the ranks, a parameter trains that did
                not when the plan was applied, or a parameter was replaced. Or the optimizer uses an operator that
                DTensors lack.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        followers = self._stage.followers
        for name, parameter in self._module.named_parameters():
            if id(parameter) in followers:
                continue
            if parameter.requires_grad and name not in self._stage.parameters:
                raise ConfigError(
                    f"{name} was made to train after parallelize(), so its gradient is not summed over the ranks; set "
                    "requires_grad before parallelize(), or call parallelize() on a new model"
                )
            if parameter.requires_grad:
                self._stage.check_parameter(name, parameter)
        self._backward.average_set_by_user()
        self._stage.check_step()
        undo = _nothing
        with self._own_step():
            if ok is None:
                self.inner.step()
            else:
                undo = step_if(self.inner, ok)
        self._stage.all_gather_params()
        if self._stage.agreement is not None:
            self._stage.agreement.settle()
        return undo if closure is None else loss

    @contextmanager
    def _own_step(self) -> Iterator[None]:
        """Allow optimizers to step this optimizer's parameters, also those that the inner one is made of."""
        token = _stepping.set(frozenset(map(id, self._stage.optimized.values())))
        try:
            yield
        except (NotImplementedError, RuntimeError) as error:
            if self._stage.stage < 3 or not is_raised_in(error, "torch.distributed.tensor"):
                raise
            raise ConfigError(
                f"{type(self.inner).__name__} cannot step parameters that zero=3 shards ({first_line(error)}): use "
                "zero=2, zero=0, or another optimizer"
            ) from error
        finally:
            _stepping.reset(token)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradient down to a norm; see :meth:`fastfold.parallel.Parallel.clip_grad_norm_`."""
        return clip_norm(self._stage, max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters and of this rank's share of them.

        Gradients are None afterwards, whatever ``set_to_none``.
        """
        self.inner.zero_grad(set_to_none=True)
        self._stage.forget_gradients()

    def initialize(self) -> None:
        """Create the state before the first step, so that all checkpoints hold the same tensors.

        Raises:
            ConfigError: The optimizer's first state is not known.
        """
        initialize_state(self.inner)

    def state_dict(self) -> OptimizerState:  # type: ignore[override]
        """Return state and parameter groups by the plain model's names and keys (a collective).

        The tensors of ``state`` are those of an optimizer of the plain model on one process. ``param_groups`` has
        learning rates and other options of each group, with names in ``params``.
        """
        state = self._state(lambda values: self._full_state.plain(self._stage.whole(values)))
        return {"state": state, "param_groups": self._named_groups()}

    def sharded_state_dict(self) -> OptimizerState:
        """Return :meth:`state_dict` for ``torch.distributed.checkpoint``, with tensors in slices (a collective).

        The slices are of this stage's tensors. No rank holds the whole state at any time; see
        :meth:`fastfold.parallel.parallel_model.Parallel.sharded_state_dict`.
        """
        state = self._state(lambda values: self._full_state.cut(list(values), self._stage.wholes(values)))
        return {"state": state, "param_groups": self._named_groups()}

    def _named_groups(self) -> list[ParamGroup]:
        return named_groups(self.inner.param_groups, self._names, self._full_state)

    @property
    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._stage.optimized.items()}

    def _state(self, plain: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> State:
        """Convert this rank's state to one by the plain model's names."""
        state: State = {}
        keys = sorted(self._keys(), key=self._is_scalar)
        for key in keys:
            values, is_scalar = self._values(key), self._is_scalar(key)
            of_plain = self._full_state.plain_scalars(values) if is_scalar else plain(values)
            for name, x in of_plain.items():
                if not is_scalar or name in state or len(keys) == 1:
                    state.setdefault(name, {})[key] = x
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict` or :meth:`sharded_state_dict`, of any plan (a collective).

        A parameter without a state had no gradient yet, and starts with a fresh state. Groups of parameters that
        ``param_groups`` does not have keep their options. States without ``param_groups``, as FastFold 0.1 wrote them,
        are loaded with a warning.

        Raises:
            ConfigError: Keys are missing, shapes differ, the state has parameters that the model does not have, or its
                groups are others.
        """
        if not state_dict:
            return
        if "param_groups" not in state_dict:
            warnings.warn(
                "the optimizer's state has no param_groups, because it was written by FastFold 0.1: learning rates and "
                "other options stay as the optimizer was created; set them before the next step",
                stacklevel=2,
            )
            state_dict = {"state": state_dict, "param_groups": []}
        self._load_tensors(state_dict["state"])
        restore_groups(self.inner.param_groups, self._names, self._full_state, state_dict["param_groups"])

    def _load_tensors(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        if not state:
            return
        unknown = sorted(set(state) - set(self._full_state.names))
        if unknown:
            raise ConfigError(
                f"the optimizer's state has {unknown[0]}, which is not a parameter of the model"
            )
        is_known = has_known_state(self.inner)
        if is_known:
            self.initialize()
        loaded = dict.fromkeys(key for of_one in state.values() for key in of_one)
        for key in self._keys() if is_known else loaded:
            wanted = self._values(key)
            # Another rank may hold the parameters with this key.
            everywhere = len(wanted) == len(self._stage.optimized)
            missing = [n for n, of_one in state.items() if key not in of_one and (everywhere or n in wanted)]
            if is_known and missing:
                raise ConfigError(
                    f"the optimizer's state lacks {key} of {missing[0]}; load the state of the same kind of optimizer"
                )
            values = {name: of_one[key] for name, of_one in state.items() if key in of_one}
            if all(x.dim() == 0 for x in values.values()):
                self._fill(self._full_state.shard_scalars(values, list(self._stage.optimized)), key)
                continue
            for names in self._full_state.joined_together(values):
                plain = {name: whole(values[name]) for name in names}
                self._fill(self._stage.part(self._full_state.shard(plain)), key)

    @torch.no_grad()
    def _fill(self, own: Mapping[str, Tensor], key: str) -> None:
        """Copy this rank's share into the state; a parameter without a value never had a gradient."""
        for name, x in own.items():
            parameter = self._stage.optimized.get(name)
            if parameter is None:
                continue
            state = self.inner.state[parameter]
            if state.get(key) is None:
                if has_known_state(self.inner):
                    continue
                is_alike = x.shape == parameter.shape
                state[key] = torch.zeros_like(parameter, dtype=x.dtype) if is_alike else x.clone()
            if x.shape != state[key].shape:
                shapes = f"expected shape {tuple(state[key].shape)}, found {tuple(x.shape)}"
                raise ConfigError(f"{key} of {name}: {shapes}")
            state[key].copy_(x)

    def _keys(self) -> list[str]:
        keys: dict[str, None] = {}
        for parameter in self._stage.optimized.values():
            keys |= dict.fromkeys(key for key, x in self.inner.state[parameter].items() if x is not None)
        return list(keys)

    def _is_scalar(self, key: str) -> bool:
        """Return True if a state's key is one number for each parameter (a step counter)."""
        return all(x.dim() == 0 for x in self._values(key).values())

    def _values(self, key: str) -> dict[str, Tensor]:
        """Return the values of a state's key, by name, of the parameters that have it."""
        states = {name: self.inner.state[p].get(key) for name, p in self._stage.optimized.items()}
        return {name: x for name, x in states.items() if x is not None}


_NORM_EPS = 1e-6  #: Term that ``torch.nn.utils.clip_grad_norm_`` adds to the norm


def clip_norm(gradients: ReducedGradients, max_norm: float) -> float:
    """Scale the whole model's gradient down to a norm; return its previous norm (a collective)."""
    norm = float(gradients.gradient_square().sqrt())
    scale = max_norm / (norm + _NORM_EPS)
    if scale < 1:
        for parameter in gradients.optimized.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        gradients.accept_gradients()
    return norm


def _nothing() -> None:
    """Do nothing: the step took place."""


def step_if(optimizer: Optimizer, ok: Tensor) -> Callable[[], None]:
    """Step the optimizer, and restore parameters and states bit by bit where ``ok`` is false.

    PyTorch's optimizers keep their step counters on the host. These count the step whether or not it is cancelled. The
    result is a function that restores them, to call before the next step if the step was cancelled. The states exist
    already and are changed in place; ``ok`` is a boolean scalar on the parameters' device.

    Raises:
        ConfigError: The optimizer made new states, whose earlier values are unknown.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    states = _states(optimizer, parameters)
    counters = [x for x in states if x.dim() == 0 and x.device.type == "cpu"]
    of_host = {id(x) for x in counters}
    values = [local(x).detach() for x in (*parameters, *states) if id(x) not in of_host]
    kept, counts = [x.clone() for x in values], [x.clone() for x in counters]
    optimizer.step()
    if {id(x) for x in _states(optimizer, parameters)} != {id(x) for x in states}:
        raise ConfigError(
            f"{type(optimizer).__name__} made new states in a step that may be cancelled; call initialize() of "
            "the optimizer before the first step, or step() without ok"
        )
    keep_unless(ok, values, kept)

    def undo() -> None:
        for x, count in zip(counters, counts, strict=True):
            x.copy_(count)

    return undo


def _states(optimizer: Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [x for p in parameters for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]


@torch.no_grad()
def keep_unless(ok: Tensor, values: list[Tensor], kept: list[Tensor]) -> None:
    """Overwrite ``values`` in place with ``kept`` unless ``ok``."""
    for x, old in zip(values, kept, strict=True):
        x.copy_(torch.where(ok, x, old))


Factory = Callable[[Mapping[str, nn.Parameter]], Optimizer]

_SIDE = 4  #: Length of each dimension of a small parameter in a trial
_LARGEST = 256  #: Longest side of a matrix in a trial; the usual optimizers factor moments from 128 on
_STEPS = 12  #: Number of steps of a trial


def on_pieces(
    factory: Factory, parameters: Mapping[str, nn.Parameter], pieces: Mapping[str, nn.Parameter]
) -> Optimizer:
    """Create the factory's optimizer and replace its parameters by their pieces, group by group.

    The factory sees whole parameters, so it may sort them by name or by number of dimensions. Each piece is flat,
    ``[n]``.

    Raises:
        ConfigError: The optimizer's update of an element depends on other elements of the parameter.
    """
    optimizer = factory(parameters)
    if not isinstance(optimizer, LayerwiseOptimizer) and not _steps_parts(
        factory, parameters, lambda _, x: x.flatten()[: x.numel() // 2]
    ):
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole parameters, and zero=1 and zero=2 leave each rank flat pieces of "
            "them; use zero=0"
        )
    _replace(optimizer, {p: pieces[name] for name, p in parameters.items()})
    return optimizer


def check_cut(
    optimizer: Optimizer, factory: Factory, parameters: Mapping[str, nn.Parameter], cut: Collection[str]
) -> None:
    """Refuse an optimizer of whole parameters where tensor parallelism cuts the parameters of some names.

    Raises:
        ConfigError: The optimizer's update of an element depends on other elements of the parameter.
    """

    def part(name: str, x: Tensor) -> Tensor:
        return x[tuple(slice((length + 1) // 2) for length in x.shape)] if name in cut else x

    trained = [name for name in parameters if name in cut]
    if (
        trained
        and not isinstance(optimizer, LayerwiseOptimizer)
        and not _steps_parts(factory, parameters, part)
    ):
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole parameters, and tp cuts some of them ({trained[0]}) over the "
            "ranks; leave their layers out of layers=, or use another optimizer"
        )


def _replace(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [replaced[parameter] for parameter in group["params"]]
    if isinstance(optimizer, LayerwiseOptimizer):
        optimizer.names = {replaced[parameter]: name for parameter, name in optimizer.names.items()}


def _steps_parts(
    factory: Factory, parameters: Mapping[str, nn.Parameter], part: Callable[[str, Tensor], Tensor]
) -> bool:
    """Return True if a trial of the optimizer steps parts of parameters as it steps whole ones.

    ``part`` returns the part of a tensor by its name. Factored moments begin at a size, and global scales begin after a
    warm-up. So the trial takes several steps, and one stand-in of each shape is as large as its parameter, up to a
    limit.
    """
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, ...]] = set()

    def trial(name: str) -> nn.Parameter:
        shape: tuple[int, ...] = parameters[name].shape
        limit = _LARGEST if len(shape) <= 2 else _SIDE * 4
        shape = tuple(min(limit, length) for length in shape)
        if shape in seen:
            shape = tuple(min(_SIDE, length) for length in shape)
        seen.add(shape)
        return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

    whole = {name: trial(name) for name in parameters}
    same = {name: nn.Parameter(x.detach().clone()) for name, x in whole.items()}
    parts = {name: nn.Parameter(part(name, x.detach()).clone()) for name, x in whole.items()}
    stepped = factory(whole)
    in_parts = factory(same)
    _replace(in_parts, {x: parts[name] for name, x in same.items()})
    try:
        for _ in range(_STEPS):
            for name, x in whole.items():
                x.grad = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                parts[name].grad = part(name, x.grad).clone()
            stepped.step()
            in_parts.step()
            if not all(torch.allclose(part(name, x), parts[name]) for name, x in whole.items()):
                return False
    except Exception:  # any error would otherwise end the run on one rank only
        return False
    return True
