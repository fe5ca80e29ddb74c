"""LAMB and LARS: layer-wise scaled steps for batches of thousands of samples.

Both scale a layer's update by the ratio of the norm of its weights to the norm of its update. These are norms of the
whole layer, also if its weights are sharded: :func:`fastfold.parallel.parallelize` gives the optimizers the right
:class:`~fastfold.parallel.data_parallel.sharded_norm.ShardNorms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.sharded_norm import ShardNorms, local
from fastfold.utils.lazy import old_attributes


@old_attributes({"initialise": "initialize"})
class LayerwiseOptimizer(Optimizer):
    """Optimizer that scales each layer's update by norms.

    A layer is one parameter. A parameter steps without the ratio if its norm or its update's norm is zero, so layers
    that are initialised to zero can train.

    Parameters are by name, as :meth:`fastfold.parallel.Parallel.optimizer` hands them to a factory.
    """

    measures_gradient = False
    """True if the ratio uses the norm of the gradient instead of that of the update."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], defaults: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            if not defaults[name] >= 0:
                raise ConfigError(f"optim.{name}: expected at least 0, found {defaults[name]}")
        super().__init__(parameters.values(), defaults)
        self.names = {parameter: name for name, parameter in parameters.items()}
        """Name of each parameter."""
        self.norms = ShardNorms({})
        """Norms over the ranks; a plan replaces these norms of one rank."""

    def initialize(self) -> None:
        """Create the state of every parameter, as the first step would."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = self._first_state(parameter)

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        raise NotImplementedError

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return a parameter's update before the ratio: with weight decay, without learning rate."""
        raise NotImplementedError

    def _ratio(self, weights: Tensor, lengths: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the factors ``[n]`` of updates, from norms ``[n]`` of weights and of updates or gradients."""
        raise NotImplementedError

    def _move(self, parameter: nn.Parameter, step: Tensor, group: dict[str, Any]) -> None:
        """Apply the step, the update times the ratio."""
        local(parameter).sub_(step, alpha=group["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of all ranks, with the same parameters; a collective where they are sharded.

        ``closure`` computes the loss again, with gradients; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.initialize()
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not present:
                continue
            gradients = {self.names[p]: local(p.grad) for p in present if p.grad is not None}
            updates = {
                name: self._update(p, gradient, group)
                for p, (name, gradient) in zip(present, gradients.items(), strict=True)
            }
            layers = {self.names[p]: local(p) for p in present}
            weights = self.norms.squares(layers).sqrt()
            lengths = self.norms.squares(gradients if self.measures_gradient else updates).sqrt()
            ratio = self._ratio(weights, lengths, group)
            ratio = torch.where((weights > 0) & (lengths > 0), ratio, 1.0)
            for parameter, update, factor in zip(present, updates.values(), ratio, strict=True):
                self._move(parameter, update * factor.to(update.dtype), group)
        return loss


class Lamb(LayerwiseOptimizer):
    """Adam with layer-wise steps (You et al. 2020, "Large batch optimization for deep learning", algorithm 2).

    Args:
        parameters: By name.
        lr: Learning rate; a schedule sets it before each step.
        betas: Decays of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the weights that is added to the update before its norm is computed.
        weight_norms: Range to which the weights' norm is clamped for the ratio (the paper's φ).

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> import torch
        >>> from fastfold.parallel import Lamb
        >>> weight = torch.nn.Parameter(torch.full((4,), 3.0))
        >>> optimizer = Lamb({"weight": weight}, lr=0.1)
        >>> weight.grad = torch.full((4,), 1e6)
        >>> optimizer.step()
        >>> [round(x, 3) for x in weight.tolist()]  # a step of a tenth of its norm, for any gradient
        [2.7, 2.7, 2.7, 2.7]
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        weight_norms: tuple[float, float] = (0.0, 10.0),
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas: expected decays of at least 0 and below 1, found {betas}")
        if not 0 <= weight_norms[0] < weight_norms[1]:
            raise ConfigError(f"weight_norms: expected a range (low, high), found {weight_norms}")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, options | {"weight_norms": weight_norms})

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return _first_moments(parameter)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        first, second = group["betas"]
        state["step"] += 1
        count = float(state["step"])
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        denominator = (square / (1 - second**count)).sqrt_().add_(group["eps"])
        update = (mean / (1 - first**count)).div_(denominator)
        return update.add_(local(parameter), alpha=group["weight_decay"])

    def _ratio(self, weights: Tensor, lengths: Tensor, group: dict[str, Any]) -> Tensor:
        return weights.clamp(*group["weight_norms"]) / lengths


class Lars(LayerwiseOptimizer):
    """SGD with momentum and layer-wise steps.

    Source: You, Gitman and Ginsburg 2017, "Large batch training of convolutional networks", algorithm 1.

    Args:
        parameters: By name.
        lr: Learning rate; a schedule sets it before each step.
        momentum: Share of the last step that is added to this one.
        weight_decay: Factor of the weights that is added to the gradient and to the norms in the ratio.
        trust: Factor of the ratio; it limits how far a layer moves in one step.

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> import torch
        >>> from fastfold.parallel import Lars
        >>> weight = torch.nn.Parameter(torch.full((4,), 3.0))
        >>> optimizer = Lars({"weight": weight}, lr=1.0, trust=0.1)
        >>> weight.grad = torch.full((4,), 1e6)
        >>> optimizer.step()
        >>> [round(x, 3) for x in weight.tolist()]  # a step of a tenth of its norm, for any gradient
        [2.7, 2.7, 2.7, 2.7]
    """

    measures_gradient = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ConfigError(f"optim.momentum: expected at least 0 and below 1, found {momentum}")
        if not trust > 0:
            raise ConfigError(f"trust: expected a factor above 0, found {trust}")
        super().__init__(
            parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient.add(local(parameter), alpha=group["weight_decay"])

    def _ratio(self, weights: Tensor, lengths: Tensor, group: dict[str, Any]) -> Tensor:
        return group["trust"] * weights / (lengths + group["weight_decay"] * weights)

    def _move(self, parameter: nn.Parameter, step: Tensor, group: dict[str, Any]) -> None:
        velocity = local(self.state[parameter]["momentum_buffer"])
        velocity.mul_(group["momentum"]).add_(step, alpha=group["lr"])
        local(parameter).sub_(velocity)


def has_known_state(optimizer: Optimizer) -> bool:
    """Return True for optimizers that :func:`initialize_state` takes."""
    is_plain = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]
    return is_plain or hasattr(optimizer, "initialize") or isinstance(optimizer, _ADAM)


def initialize_state(optimizer: Optimizer) -> None:
    """Create an optimizer's state before its first step, so that all checkpoints hold the same tensors.

    Args:
        optimizer: An optimizer with a method ``initialize``, such as :class:`LayerwiseOptimizer`; Adam or AdamW; or
            SGD without momentum.

    Raises:
        ConfigError: Another kind of optimizer.
    """
    if not has_known_state(optimizer):
        raise ConfigError(
            f"the first state of {type(optimizer).__name__} is not known; use Adam, Lamb or Lars"
        )
    initialize = getattr(optimizer, "initialize", None)
    if initialize is not None:
        initialize()
    elif isinstance(optimizer, _ADAM):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    optimizer.state[parameter] = _first_moments(parameter, amsgrad=group["amsgrad"])


_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def _first_moments(parameter: nn.Parameter, *, amsgrad: bool = False) -> dict[str, Tensor]:
    """Return Adam's state of a parameter before the first step."""
    moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
    return {"step": torch.tensor(0.0)} | {name: torch.zeros_like(parameter) for name in moments}
