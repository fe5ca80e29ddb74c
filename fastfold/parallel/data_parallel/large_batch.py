"""LAMB and LARS: steps as long as each layer's weights allow, for batches of thousands of samples.

Both scale a layer's update by the ratio of the norm of its weights to that of its update. The norms are those of the
whole layer, however its weights are sharded: :func:`fastfold.parallel.parallelize` gives the optimizers the
:class:`~fastfold.parallel.data_parallel.sharded_norm.ShardNorms` that know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.sharded_norm import ShardNorms, local


class LayerwiseOptimizer(Optimizer):
    """An optimizer that looks at each layer's norms.

    A layer is one parameter. Parameters whose norm or whose update's norm is zero step as without the ratio, so layers
    that start from zeros do start.

    Args:
        parameters: By name, as :meth:`fastfold.parallel.Parallel.optimizer` hands them to a factory.
        defaults: Of the parameter group.
    """

    measures_gradient = False
    """Whether the ratio is that to the norm of the gradient rather than of the update."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], defaults: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            if not defaults[name] >= 0:
                raise ConfigError(f"optim.{name} must be at least 0, got {defaults[name]}")
        super().__init__(parameters.values(), defaults)
        self.names = {parameter: name for name, parameter in parameters.items()}
        """Each parameter's name."""
        self.norms = ShardNorms({})
        """How norms are added up over the ranks; alone until a plan says otherwise."""

    def initialise(self) -> None:
        """Make the state of every parameter, as the first step would find it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = self._first_state(parameter)

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        raise NotImplementedError

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """The update of one parameter before the ratio; weight decay included, learning rate not."""
        raise NotImplementedError

    def _ratio(self, weights: Tensor, lengths: Tensor, group: dict[str, Any]) -> Tensor:
        """Factors ``[n]`` of the updates, from the norms of the weights and of what is measured ``[n]``."""
        raise NotImplementedError

    def _move(self, parameter: nn.Parameter, step: Tensor, group: dict[str, Any]) -> None:
        """Take the step, which is update times ratio."""
        local(parameter).sub_(step, alpha=group["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; a collective where parameters are sharded: all ranks step, with the same parameters.

        Args:
            closure: Computes the loss again, with gradients.

        Returns:
            What the closure gave.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.initialise()
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
        lr: Learning rate; to be set before each step by a schedule.
        betas: Decays of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Times the weights, added to the update before its norm is taken.
        weight_norms: The weights' norm is clamped into this range for the ratio (the paper's φ).

    Raises:
        ConfigError: A value has no meaning.
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
            raise ConfigError(f"the decays of the moments must lie in 0 to 1, got {betas}")
        if not 0 <= weight_norms[0] < weight_norms[1]:
            raise ConfigError(f"the range of the weights' norm is empty: {weight_norms}")
        super().__init__(
            parameters,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "weight_norms": weight_norms,
            },
        )

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
    """SGD with momentum and layer-wise steps (You, Gitman and Ginsburg 2017, "Large batch training of convolutional
    networks", algorithm 1).

    Args:
        parameters: By name.
        lr: Learning rate; to be set before each step by a schedule.
        momentum: Share of the last step that stays.
        weight_decay: Times the weights, added to the gradient, as to the norms in the ratio.
        trust: The ratio's factor, which says how far a layer may move in one step.

    Raises:
        ConfigError: A value has no meaning.
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
            raise ConfigError(f"optim.momentum must lie in 0 to 1, got {momentum}")
        if not trust > 0:
            raise ConfigError(f"the trust factor must be above 0, got {trust}")
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


def initialise_state(optimizer: Optimizer) -> None:
    """Make an optimizer's state before its first step, so that checkpoints always hold the same tensors.

    Args:
        optimizer: One that has a method ``initialise`` for this, as a :class:`LayerwiseOptimizer`; Adam or AdamW; or
            SGD without momentum.

    Raises:
        ConfigError: Another kind.
    """
    initialise = getattr(optimizer, "initialise", None)
    if initialise is not None:
        initialise()
    elif isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        for parameter in _parameters(optimizer):
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = _first_moments(parameter)
    elif not (isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]):
        raise ConfigError(
            f"the first state of {type(optimizer).__name__} is not known; use Adam, Lamb or Lars"
        )


def _first_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """What Adam keeps of a parameter, before its first step."""
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
