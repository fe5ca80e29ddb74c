"""One call of a model without data: the order of its modules, and the ones that call attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from fastfold.errors import ConfigError, first_line
from fastfold.utils.module_structure import fake, fake_copy, tensors_in

_ATTENTION = (scaled_dot_product_attention, multi_head_attention_forward)


@dataclass
class CallTrace:
    """Record of one call."""

    name: str  #: Class of the model
    called: list[str] = field(default_factory=list)  #: Paths of modules in the order of their calls
    outputs: dict[str, Any] = field(default_factory=dict)  #: Last result of each module, without data
    sizes: dict[str, int] = field(default_factory=dict)  #: Number of tensors in each result
    attention: dict[str, type[nn.Module]] = field(
        default_factory=dict
    )  #: Innermost modules that call attention


def trace_call(model: nn.Module, wanted: str) -> CallTrace:
    """Call a copy of a model without data, with its ``dummy_inputs`` or token ids.

    Args:
        model: Any module; unchanged.
        wanted: Argument of :func:`fastfold.parallel.parallelize` that needs the trace, for the message.

    Raises:
        ConfigError: The call fails; the message has its error and the argument.
    """
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, Mapping):
        inputs = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied, trace, stack = fake_copy(model, mode), CallTrace(type(model).__name__), list[str]()
    for path, module in copied.named_modules():
        module.register_forward_pre_hook(partial(_enter, trace, stack, path))
        module.register_forward_hook(partial(_leave, trace, stack, path))
    try:
        with mode, torch.no_grad(), _AttentionCalls(partial(_note_attention, trace, stack, copied)):
            copied(**tree_map_only(Tensor, fake, dict(inputs)))
    except Exception as error:  # models raise any type where a value decides
        raise ConfigError(
            f'{wanted}="auto" calls {type(model).__name__} once without data, which raises {type(error).__name__}: '
            f"{first_line(error)}; give {wanted}= as a function"
        ) from error
    return trace


def _enter(trace: CallTrace, stack: list[str], path: str, *_: Any) -> None:
    stack.append(path)
    trace.called.append(path)


def _leave(trace: CallTrace, stack: list[str], path: str, _: nn.Module, __: Any, output: Any) -> None:
    stack.pop()
    trace.outputs[path], trace.sizes[path] = output, len(list(tensors_in(output)))


def _note_attention(trace: CallTrace, stack: list[str], model: nn.Module) -> None:
    path = stack[-1]
    trace.attention[path] = type(model.get_submodule(path))


class _AttentionCalls(TorchFunctionMode):
    """Calls a function before every attention of PyTorch."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ATTENTION:
            self._note()
        return func(*args, **(kwargs or {}))
