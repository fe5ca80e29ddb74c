"""Backward passes that communicate and cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fastfold.errors import ConfigError


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward pass refuse ``create_graph=True``, instead of failing in the second one.

    Args:
        backward: Static method of a ``torch.autograd.Function``.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True (a gradient penalty or second derivative) needs second derivatives of messages "
                "between ranks, which this plan lacks; use dp with zero=0, 1 or 2, or tp in 1d"
            )
        return once(ctx, *gradients)

    return checked
