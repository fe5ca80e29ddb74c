"""Registration of operators with PyTorch: forward and backward pass, results of fake tensors, and costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastfold.kernels.common.backend import runs_directly
from fastfold.kernels.common.cost import OPERATOR_COSTS, CostOf, no_products
from fastfold.kernels.common.parameters import empty_grads, grads_or_none


def define_operator(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., list[Tensor]] | None = None,
    *,
    fake: Callable[..., Any],
    cost: CostOf = no_products,
    schema: str | None = None,
    backward_fake: Callable[..., list[Tensor]] | None = None,
    backward_cost: CostOf = no_products,
    gradients: Sequence[str] = (),
    residual: str | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Operator:
    """Register ``fastfold::name``, and with a ``backward`` its gradients by ``fastfold::name_backward``.

    A backward operator takes the gradient of the result, inputs of the forward pass by their names, the result as
    ``out``, and ``needs``: a flag for each tensor of ``gradients``. It returns their gradients, empty if not needed.
    Only the tensors that it takes are saved. Autograd casts gradients to the dtypes of their inputs.

    Args:
        name: Name in the namespace ``fastfold``.
        forward: Computes the result.
        backward: Computes the gradients; None for an operator without any, or with its own ``register_autograd``.
        fake: Returns an uninitialised result.
        cost: Cost of a call.
        schema: Schema of ``forward``, if its signature lacks names.
        backward_fake: Returns uninitialised gradients; None for tensors like the inputs.
        backward_cost: Cost of a call of ``backward``.
        gradients: Names of inputs with gradients, tensors or lists of tensors.
        residual: Name of an input that is added to the result, or None.
        constants: Further arguments of ``backward``.

    Returns:
        The operator, to be called.
    """
    operator = torch.library.custom_op(f"fastfold::{name}", forward, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    OPERATOR_COSTS[name] = cost
    call = Operator(forward, operator)
    if backward is None:
        return call
    signature = inspect.signature(backward)

    def like_inputs(*arguments: Any, **options: Any) -> list[Tensor]:
        given = signature.bind(*arguments, **options).arguments
        tensors = _flat(given[x] for x in gradients)
        return empty_grads([given["grad"] if x is None else x for x in tensors], given["needs"])

    found = define_operator(
        f"{name}_backward", backward, fake=backward_fake or like_inputs, cost=backward_cost
    )
    parameters = inspect.signature(forward).parameters.values()
    inputs = [x.name for x in parameters if x.kind is not x.KEYWORD_ONLY]
    kept = [x for x in (*(p.name for p in parameters), "out") if x in signature.parameters]
    gradient = _Gradient(found, inputs, kept, gradients, residual, constants or {})
    operator.register_autograd(gradient.compute, setup_context=gradient.save)
    return call


@dataclass(frozen=True)
class Operator:
    """Operator that runs without PyTorch's dispatcher where :func:`runs_directly` allows it.

    Attributes:
        forward: Computes the result.
        registered: Operator of PyTorch.
    """

    forward: Callable[..., Any]
    registered: Any

    def __call__(self, first: Tensor | Sequence[Tensor], /, *arguments: Any, **options: Any) -> Any:
        """Compute the result, with the arguments of ``forward``."""
        x = first if isinstance(first, Tensor) else first[0]
        compute = self.forward if runs_directly(x) else self.registered
        return compute(first, *arguments, **options)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register a backward pass; see :meth:`torch.library.CustomOpDef.register_autograd`."""
        self.registered.register_autograd(backward, setup_context=setup_context)


@dataclass(frozen=True)
class _Gradient:
    """Backward pass of an operator by another operator."""

    operator: Any
    inputs: Sequence[str]
    kept: Sequence[str]
    gradients: Sequence[str]
    residual: str | None
    constants: Mapping[str, Any]

    def save(
        self, ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Mapping[str, Any] | None = None
    ) -> None:
        given = {**dict(zip(self.inputs, inputs, strict=True)), **(keyword_only_inputs or {}), "out": output}
        kept = {name: given[name] for name in self.kept}
        tensors = {name: x for name, x in kept.items() if x is None or isinstance(x, Tensor | list | tuple)}
        ctx.options = {name: x for name, x in kept.items() if name not in tensors}
        ctx.lengths = {name: len(x) if isinstance(x, list | tuple) else None for name, x in tensors.items()}
        ctx.save_for_backward(*_flat(tensors.values()))

    def compute(self, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Saved tensors are read once: activation checkpointing returns them a single time.
        saved = iter(ctx.saved_tensors)
        tensors = {
            name: next(saved) if n is None else [next(saved) for _ in range(n)]
            for name, n in ctx.lengths.items()
        }
        needed = dict(zip(self.inputs, ctx.needs_input_grad, strict=True))
        needs = _flat(needed[name] for name in self.gradients)
        grads = iter(
            grads_or_none(self.operator(grad, **tensors, **ctx.options, **self.constants, needs=needs), needs)
        )
        found: dict[str, Any] = {
            name: [None] * len(x) if isinstance(x, list | tuple) else None for name, x in needed.items()
        }
        for name in self.gradients:
            many = isinstance(needed[name], list | tuple)
            found[name] = [next(grads) for _ in needed[name]] if many else next(grads)
        if self.residual is not None and needed[self.residual]:
            found[self.residual] = grad
        return tuple(found.values())


def _flat(values: Iterable[Any]) -> list[Any]:
    """Return the values in order, with those of lists and tuples one by one."""
    return [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
