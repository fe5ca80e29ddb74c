"""Tensors whose numbers are kept in another place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.errors import ConfigError


class AbsentTensor(Tensor):
    """Tensor with a shape but without numbers; reading or changing them raises an error.

    It replaces a tensor that was moved away, so that no caller takes its absence for zeros.

    ``reason`` is the error's message: the place of the numbers, and what to do instead.
    """

    reason: str

    @staticmethod
    def __new__(cls, like: Tensor, reason: str) -> AbsentTensor:
        made: Any = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.reason = reason
        return made

    def __init__(self, like: Tensor, reason: str) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentTensor({list(self.shape)}: {self.reason})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        raise ConfigError(next(x.reason for x in flat if isinstance(x, AbsentTensor)))
