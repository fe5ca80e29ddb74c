"""Sequence parallelism of a model that does not name its attention: ``sequence="auto"``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.families.call_trace import trace_call
from fastfold.parallel.sequence_parallel.module import SequenceParallel


def spread_attention(model: nn.Module) -> Callable[[nn.Module, Group], SequenceParallel]:
    """Return the function that applies sequence parallelism to the modules that call attention.

    A model with an argument ``position_ids`` gets those of this rank's part, if the caller gives none.

    Raises:
        ConfigError: A call of the model without data fails, or no module of it calls PyTorch's attention.
    """
    trace = trace_call(model, "sequence")
    kinds = tuple(dict.fromkeys(trace.attention.values()))
    if not kinds:
        raise ConfigError(
            f'sequence="auto": {trace.name} does not call torch.nn.functional.scaled_dot_product_attention; '
            'models of transformers do with attn_implementation="sdpa"'
        )

    def apply(module: nn.Module, group: Group) -> SequenceParallel:
        sequence = SequenceParallel(module, group, attention=kinds)
        if "position_ids" in signature(module.forward).parameters:
            sequence.module.register_forward_pre_hook(_Positions(sequence), with_kwargs=True)
        return sequence

    return apply


class _Positions:
    """Adds the positions of this rank's part to a call without ``position_ids``."""

    def __init__(self, sequence: SequenceParallel) -> None:
        self._sequence = sequence

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._sequence.is_whole:
            # The comparison with the model's own positions refuses models that count them in another way.
            return None
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if x is None or kwargs.get("position_ids") is not None:
            return None
        first = self._sequence.first
        positions = torch.arange(first, first + x.shape[1], device=x.device)[None]
        return args, kwargs | {"position_ids": positions}
