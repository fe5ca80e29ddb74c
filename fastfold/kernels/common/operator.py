"""Registration of operators with PyTorch: forward and backward pass, results of fake tensors, and costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastfold.kernels.common.backend import Operator
from fastfold.kernels.common.cost import OPERATOR_COSTS, Arguments, CostOf, no_products
from fastfold.kernels.common.parameters import empty_grads, grads_or_none
from fastfold.kernels.common.scratch import without_autocast


@dataclass(frozen=True)
class BackwardPass:
    """Backward pass of an operator, which is registered as an operator too."""

    #: Takes the gradient of the result, inputs of the forward pass by their names, the result as ``out``, and
    #: ``needs``: a flag for each tensor of ``gradients``. It returns their gradients, empty if not needed. Only the
    #: tensors that it takes are saved. Autograd casts gradients to the dtypes of their inputs.
    compute: Callable[..., list[Tensor]]
    gradients: Sequence[str]  #: Names of inputs with gradients, tensors or lists of tensors
    #: Returns uninitialised gradients from the arguments of ``compute``; None for tensors like the inputs
    fake: Callable[[Arguments], list[Tensor]] | None = None
    cost: CostOf = no_products  #: Cost of a call
    residual: str | None = None  #: Name of an input that is added to the result, or None
    constants: Mapping[str, Any] = field(default_factory=dict)  #: Further arguments of ``compute``
    #: Returns what ``compute`` takes as ``out``, from the result and the forward pass' inputs
    saved_result: Callable[[Any, Arguments], Any] = lambda result, call: result
    #: Returns the gradients, from the results and arguments of ``compute``: for gradients that are views
    arrange: Callable[[list[Tensor], Arguments], Sequence[Tensor | None]] = lambda results, call: results


def kept_memory(result: tuple[Any, Tensor], call: Arguments) -> list[Tensor]:
    """Return the second result, memory with values for the backward pass, in a list; empty unless ``call`` keeps them.

    It is a ``saved_result`` of :class:`BackwardPass`.
    """
    return [result[1]] if call["keep"] else []


def define_operator(
    name: str,
    forward: Callable[..., Any],
    backward: BackwardPass | None = None,
    *,
    fake: Callable[..., Any],
    cost: CostOf = no_products,
) -> Operator:
    """Register ``fastfold::name`` with the cost of a call, and with a ``backward`` also ``fastfold::name_backward``.

    ``fake`` returns an uninitialised result of ``forward``. Both passes run without autocast.
    """
    operator = torch.library.custom_op(f"fastfold::{name}", without_autocast(forward), mutates_args=())
    operator.register_fake(fake)
    OPERATOR_COSTS[name] = cost
    if backward is not None:
        signature = inspect.signature(backward.compute)

        def fake_gradients(*arguments: Any, **options: Any) -> list[Tensor]:
            call = signature.bind(*arguments, **options).arguments
            if backward.fake is not None:
                return backward.fake(call)
            tensors = _flat(call[x] for x in backward.gradients)
            return empty_grads([call["grad"] if x is None else x for x in tensors], call["needs"])

        compute = define_operator(
            f"{name}_backward", backward.compute, fake=fake_gradients, cost=backward.cost
        )
        compute.registered.register_autograd(_refuse_second_derivative)
        parameters = inspect.signature(forward).parameters.values()
        inputs = [x.name for x in parameters if x.kind is not x.KEYWORD_ONLY]
        kept = [x for x in (*(p.name for p in parameters), "out") if x in signature.parameters]
        gradient = _Gradient(compute, backward, inputs, kept)
        operator.register_autograd(gradient.compute, setup_context=gradient.save)
    return Operator(forward, operator)


def _refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "FastFold's operators lack second derivatives: compute values to differentiate twice by the definitions in "
        "fastfold.kernels.reference"
    )


@dataclass(frozen=True)
class _Gradient:
    """Gradients of an operator for PyTorch's autograd."""

    operator: Operator
    backward: BackwardPass
    inputs: Sequence[str]
    kept: Sequence[str]

    def save(
        self, ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Mapping[str, Any] | None = None
    ) -> None:
        call = {**dict(zip(self.inputs, inputs, strict=True)), **(keyword_only_inputs or {})}
        if "out" in self.kept:
            call["out"] = self.backward.saved_result(output, call)
        kept = {name: call[name] for name in self.kept}
        tensors = {name: x for name, x in kept.items() if x is None or isinstance(x, Tensor | list | tuple)}
        ctx.options = {name: x for name, x in kept.items() if name not in tensors}
        ctx.lengths = {name: len(x) if isinstance(x, list | tuple) else None for name, x in tensors.items()}
        ctx.save_for_backward(*_flat(tensors.values()))
        # Results that are only saved would get gradients of zeros.
        ctx.set_materialize_grads(False)

    def compute(self, ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        # Saved tensors are read once: activation checkpointing returns them a single time.
        saved = iter(ctx.saved_tensors)
        tensors = {
            name: next(saved) if n is None else [next(saved) for _ in range(n)]
            for name, n in ctx.lengths.items()
        }
        needed = dict(zip(self.inputs, ctx.needs_input_grad, strict=True))
        needs = _flat(needed[name] for name in self.backward.gradients)
        call = {**tensors, **ctx.options, **self.backward.constants, "needs": needs}
        grads = iter(grads_or_none(self.backward.arrange(self.operator(grad, **call), call), needs))
        by_input: dict[str, Any] = {
            name: [None] * len(x) if isinstance(x, list | tuple) else None for name, x in needed.items()
        }
        for name in self.backward.gradients:
            many = isinstance(needed[name], list | tuple)
            by_input[name] = [next(grads) for _ in needed[name]] if many else next(grads)
        residual = self.backward.residual
        if residual is not None and needed[residual]:
            by_input[residual] = grad
        return tuple(by_input.values())


def _flat(values: Iterable[Any]) -> list[Any]:
    """Return the values in order, with those of lists and tuples one by one."""
    return [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
