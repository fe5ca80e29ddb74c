"""Sequence parallelism of a module that was written for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.sequence_parallel.attention import ring_attention, ulysses_attention

METHODS = {"ring": ring_attention, "ulysses": ulysses_attention}


class SequenceParallel:
    """Lets a module work on this rank's part of each sequence.

    Whatever acts on positions alone needs no change. In the modules that are named here calls of
    ``torch.nn.functional.scaled_dot_product_attention`` become ring or all-to-all attention over the ranks, also when
    activation checkpointing calls them again, and tables of learned positions are read where the part lies.

    Ranks hold the same parameters and use them on different positions: the gradient of the sum of all ranks' losses is
    the sum of their gradients, as in data parallelism (the group ``replicas`` of a mesh).

    Args:
        module: Any module; changed in place.
        group: The ranks, ``mesh.group("sp")``.
        attention: Classes of the submodules that call attention.
        positions: Embeddings that are asked for positions counted from 0.
        method: ``ring`` or ``ulysses``.

    Raises:
        ConfigError: There is no such method, the module has no submodule of these classes, or was made parallel before.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        attention: type[nn.Module] | tuple[type[nn.Module], ...],
        positions: Iterable[nn.Embedding] = (),
        method: str = "ring",
    ) -> None:
        if method not in METHODS:
            raise ConfigError(f"sequence parallelism is one of {', '.join(METHODS)}, got {method!r}")
        self.module, self.group, self.method = module, group, method
        self.sizes: list[int] | None = None
        layers: list[Any] = [child for child in module.modules() if isinstance(child, attention)]
        if not layers:
            raise ConfigError(f"{type(module).__name__} has no submodule of {attention}")
        if any(hasattr(layer, "sequence") for layer in layers):
            raise ConfigError("sequence parallelism: the module is parallel already; apply it once")
        for layer in layers:
            kind: Any = type(layer)
            layer.__class__ = _parallel_variant(kind)
            layer.sequence = self
        for table in positions:
            table.register_forward_pre_hook(lambda _, inputs: (inputs[0] + self.first, *inputs[1:]))

    @property
    def first(self) -> int:
        """Position of the first of this rank's part."""
        return sum(self._sizes()[: self.group.rank])

    def shard(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of whole sequences; the module's next call is about sequences of this length.

        Args:
            x: The same on every rank, ``[..., L, ...]``.
            dim: The dimension of the positions.
        """
        self.sizes = shard_sizes(x.shape[dim], self.group.size)
        return x.narrow(dim, self.first, self.sizes[self.group.rank])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results for this rank's part."""
        return self.module(*args, **kwargs)

    def _sizes(self) -> list[int]:
        if self.sizes is None:
            raise ConfigError(
                "sequence parallelism does not know how long the sequences are: call shard first"
            )
        return self.sizes

    def attention(self) -> _Attention:
        """A context in which PyTorch's attention is that of this rank's part."""
        return _Attention(self.method, self.group, self._sizes())

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceParallel:
        # A copy of the module (an average of weights, say) works on the same sequences.
        return self


@cache
def _parallel_variant(layer: Any) -> Any:
    """A variant of a class whose attention is over the ranks; a class and not a wrapped method, so that copies work."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.sequence.attention():
            return layer.forward(self, *args, **kwargs)

    return type(f"Sequence{layer.__name__}", (layer,), {"forward": forward})


class _Attention(TorchFunctionMode):
    """Puts attention over the ranks in the place of PyTorch's."""

    def __init__(self, method: str, group: Group, sizes: list[int]) -> None:
        super().__init__()
        self.method, self.group, self.sizes = method, group, sizes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """PyTorch's attention of ``[*, H, N, D]``; ``attn_mask`` is for own queries and all keys."""
        if dropout_p or enable_gqa or key.shape != value.shape:
            raise ConfigError(
                "sequence parallel attention is without dropout of its weights, and keys and values have as many "
                "heads and channels as queries"
            )
        # [*, H, N, D] -> [*, 1, N, H, D]
        q, k, v = (x.transpose(-3, -2).unsqueeze(-4) for x in (query, key, value))
        bias = None
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
            bias = attn_mask.expand(*query.shape[:-1], sum(self.sizes))
        mixed = METHODS[self.method](
            q, k, v, bias, group=self.group, sizes=self.sizes, causal=is_causal, scale=scale
        )
        return mixed.squeeze(-4).transpose(-3, -2)
