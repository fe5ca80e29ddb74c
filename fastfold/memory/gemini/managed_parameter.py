"""Parameters that raise an error when they are read while they are not on the device.

The class of a managed parameter is :class:`ManagedParameter`, which sees every function that is called with it. While a
module uses its chunk, such functions run as with a plain parameter. A running module that uses a parameter of another
one brings its chunk. Otherwise the parameter has a shape; reading or changing its values or its gradient, which are on
the host, raises an error with a remedy. An exception are terms of a loss, such as weight penalties: they compute with a
copy on the device, whose gradient goes to the host. Inside :meth:`fastfold.memory.Gemini.params_on_host`, the class is
that of a plain parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastfold.errors import ConfigError

_GRADIENT: Any = Tensor.grad

# Functions that query a tensor without reading its values.
METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "requires_grad", "grad", "ndim", "is_leaf", "grad_fn"),
            *("nbytes", "itemsize", "is_cuda", "is_meta", "is_sparse", "is_quantized", "retains_grad"),
        )
    ),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size),
    *(Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
    *(torch.numel, torch.is_floating_point, torch.is_complex, Tensor.get_device),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
}

# Functions that do not change values; the step checks which parameters are trainable.
_HARMLESS = {
    *(Tensor.requires_grad.__set__, Tensor.requires_grad_, Tensor.register_hook),  # type: ignore[attr-defined]
    *(torch.autograd.grad, torch.autograd.backward, Tensor.backward),
}

# Functions whose result shares memory with a parameter outside of autograd, which a copy would not.
_SHARING = {Tensor.data.__get__, Tensor.detach, Tensor.numpy, Tensor.__array__}  # type: ignore[attr-defined]
_IN_PLACE = re.compile(r"[a-z].*[^_]_|__i\w+__|__set\w*__")

_NOT_OF_VALUES = {
    *(METADATA | _HARMLESS | _SHARING),
    *(_GRADIENT.__get__, _GRADIENT.__set__, Tensor.register_post_accumulate_grad_hook),
}

# Functions that depend on the memory layout, which a placeholder does not have.
_STRIDES = {Tensor.stride, Tensor.is_contiguous}


@dataclass(frozen=True)
class Place:
    """Properties of a managed parameter."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]  #: Stride of the plain parameter
    readable: bool  #: True if its values can always be read
    #: Returns True if a function may use it as a plain parameter; brings it if a module is running
    use: Callable[[Callable[..., Any]], bool]
    has_gradient: Callable[[], bool]  #: Returns True if there is a gradient on the host
    read: Callable[[], Tensor]  #: Returns a copy on the device
    add_gradient: Callable[[Tensor], None]  #: Adds a gradient on the device to the one on the host


class _Copy(torch.autograd.Function):
    """Copy of a parameter on the device, for a term of the loss."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, place: Place) -> Tensor:
        _refuse_hooks(parameter, place)
        ctx.parameter, ctx.place = parameter, place
        copied = place.read()
        # A later change in place, which would be lost, is found in the backward pass.
        ctx.save_for_backward(copied)
        return copied

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        if torch.is_grad_enabled():
            raise ConfigError(
                f"create_graph=True does not reach {ctx.place.name}, which is on the host; use policy='cuda'"
            )
        _refuse_hooks(ctx.parameter, ctx.place)
        _ = ctx.saved_tensors
        ctx.place.add_gradient(gradient)
        return None, None


def _refuse_hooks(parameter: Tensor, place: Place) -> None:
    with untouched():
        has_hooks = bool(parameter._backward_hooks)
    if has_hooks:
        raise ConfigError(
            f"a hook on the gradient of {place.name} would see only the part of its modules, without that of a term "
            "of the loss: remove the hook, and change gradients inside params_on_host() of the Gemini manager; or "
            "use policy='cuda'"
        )


class ManagedParameter(nn.Parameter):
    """Class of a managed parameter."""

    _place: Place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        managed = list(_managed((*args, *kwargs.values())))
        stand_ins = {id(p): p._stand_in(func, args, kwargs) for p in managed if not p._place.use(func)}
        if any(type(tensor) is not ManagedParameter for tensor in stand_ins.values()):
            args, kwargs = tree_map_only(
                ManagedParameter, lambda leaf: stand_ins.get(id(leaf), leaf), (args, kwargs)
            )
        # With plain parameters, other subclasses and modes get the same arguments as without a manager.
        for parameter in managed:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        try:
            return func(*args, **kwargs)
        finally:
            for parameter in managed:
                parameter.__class__ = ManagedParameter

    def _stand_in(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Return the tensor that a function may use while this parameter is away, or refuse the function."""
        place = self._place
        name = getattr(func, "__name__", "")
        with untouched():
            is_term = torch.is_grad_enabled() and self.requires_grad and not place.readable
            is_change = _IN_PLACE.fullmatch(name) is not None or "out" in kwargs
            if is_term and not is_change and func not in _NOT_OF_VALUES:
                return _Copy.apply(self, place)
            self._refuse(func, args)
            if func in _STRIDES:
                return torch.empty_strided(place.shape, place.stride, device="meta")
            return self

    def _refuse(self, func: Any, args: Any) -> None:
        place = self._place
        if func in (_GRADIENT.__get__, _GRADIENT.__set__):
            if place.has_gradient() or (func == _GRADIENT.__set__ and args[1] is not None):
                raise ConfigError(
                    f"the gradient of {place.name} is managed and on the host: clip with clip_grad_norm_() of the "
                    "Gemini manager, read or change gradients inside its params_on_host(), clear them with its "
                    "zero_grad()"
                )
        elif func == Tensor.register_post_accumulate_grad_hook:
            raise ConfigError(
                f"a hook on the accumulated gradient of {place.name} would see only the contribution of one backward "
                "pass: read gradients inside params_on_host() of the Gemini manager"
            )
        elif not place.readable and func not in METADATA and func not in _HARMLESS:
            raise ConfigError(
                f"{place.name} is managed and not on the device: read or change parameters inside params_on_host() "
                "of the Gemini manager, or use state_dict(); copy, pickle or convert a model after release(). "
                "Terms of a loss may read trainable parameters where gradients are recorded"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        made = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter({self._place.name} {list(self.shape)}, managed)"


def _managed(values: Iterable[Any]) -> Iterator[ManagedParameter]:
    for value in values:
        if isinstance(value, ManagedParameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _managed(value)
        elif isinstance(value, dict):
            yield from _managed(value.values())


def untouched() -> AbstractContextManager[None]:
    """Treat managed parameters as plain ones inside, for the manager's own code, and leave modes out."""
    return torch._C.DisableTorchFunction()


def manage(parameters: Sequence[nn.Parameter], places: Sequence[Place]) -> None:
    """Refuse reads of these parameters from here on."""
    for parameter, place in zip(parameters, places, strict=True):
        parameter.__class__ = ManagedParameter
        parameter._place = place  # type: ignore[attr-defined]


def unmanage(parameters: Sequence[nn.Parameter]) -> None:
    """Make parameters plain again."""
    for parameter in parameters:
        if isinstance(parameter, ManagedParameter):
            del parameter._place
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
