"""What is computed again in the backward pass, because it costs little and would take much to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's result, of which only the arguments are kept for the backward pass; it draws no numbers."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
