"""Sequence parallelism of a module that was written for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.sequence_parallel.attention import ring_attention, ulysses_attention

METHODS = {"ring": ring_attention, "ulysses": ulysses_attention}


class SequenceParallel:
    """Lets a module work on this rank's part of each sequence.

    Whatever acts on positions alone needs no change. In the modules that are named here calls of
    ``torch.nn.functional.scaled_dot_product_attention`` become ring or all-to-all attention over the ranks, also when
    activation checkpointing calls them again, and ``nn.MultiheadAttention`` too; tables of learned positions are read
    where the part lies. A module that is named here and calls neither, because its attention is written by hand, would
    look at its own part alone: that is refused when it runs.

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
            # A module with a hook is never run by PyTorch's fused encoder layer, which would not ask for attention.
            layer.register_forward_pre_hook(_nothing)
        for encoder in module.modules():
            if isinstance(encoder, nn.TransformerEncoder):
                # Sequences packed without their padding cannot be spread over the ranks.
                encoder.use_nested_tensor = False
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
        with self.sequence.attention() as attention:
            result = layer.forward(self, *args, **kwargs)
        if not attention.calls:
            raise ConfigError(
                f"sequence parallelism: {layer.__name__} has called no attention that can be spread over the ranks, so "
                "each position saw this rank's part alone; let it call "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        return result

    return type(f"Sequence{layer.__name__}", (layer,), {"forward": forward})


class _Attention(TorchFunctionMode):
    """Puts attention over the ranks in the place of PyTorch's."""

    def __init__(self, method: str, group: Group, sizes: list[int]) -> None:
        super().__init__()
        self.method, self.group, self.sizes = method, group, sizes
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        if func is multi_head_attention_forward:
            given = signature(multi_head_attention_forward).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            return self.attend_heads(**given.arguments)
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
        keys: Tensor | None = None,
    ) -> Tensor:
        """PyTorch's attention of ``[*, H, N, D]``; ``attn_mask`` is for own queries and all keys.

        ``keys`` ``[*, N]`` tells own keys to use from those to leave out.
        """
        if dropout_p or enable_gqa or key.shape != value.shape:
            raise ConfigError(
                "sequence parallel attention is without dropout of its weights, and keys and values have as many "
                "heads and channels as queries"
            )
        self.calls += 1
        # [*, H, N, D] -> [*, 1, N, H, D]
        q, k, v = (x.transpose(-3, -2).unsqueeze(-4) for x in (query, key, value))
        bias = unseen = None
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
            bias = attn_mask.expand(*query.shape[:-1], sum(self.sizes))
            # A query that may look at nothing gets zeros, as from PyTorch.
            unseen = (bias == -torch.inf).all(-1, keepdim=True)
            bias = bias.masked_fill(unseen, 0)
        mask = None if keys is None else keys.unsqueeze(-2)
        mixed = METHODS[self.method](
            q, k, v, bias, mask, group=self.group, sizes=self.sizes, causal=is_causal, scale=scale
        )
        mixed = mixed.squeeze(-4).transpose(-3, -2)
        return mixed if unseen is None else mixed.masked_fill(unseen, 0)

    def attend_heads(
        self,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        use_separate_proj_weight: bool,
        q_proj_weight: Tensor | None,
        k_proj_weight: Tensor | None,
        v_proj_weight: Tensor | None,
        static_k: Tensor | None,
        static_v: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, None]:
        """What ``nn.MultiheadAttention`` computes, of own positions ``[N, B, C]`` or ``[N, C]``."""
        extras = {"bias_k": bias_k, "bias_v": bias_v, "static_k": static_k, "static_v": static_v}
        given = [name for name, x in extras.items() if x is not None] + ["add_zero_attn"] * add_zero_attn
        if given:
            raise ConfigError(f"sequence parallelism: nn.MultiheadAttention with {given[0]} is not supported")
        if need_weights:
            raise ConfigError(
                "sequence parallelism: no rank has all weights of attention; call nn.MultiheadAttention with "
                "need_weights=False"
            )
        keys = None
        if key_padding_mask is not None:
            keys = key_padding_mask == 0  # True, or minus infinity, is to be left out
            if key_padding_mask.dtype != torch.bool and not (keys | key_padding_mask.isneginf()).all():
                raise ConfigError("sequence parallelism: key_padding_mask must be 0 or minus infinity")
        if use_separate_proj_weight:
            weights = [q_proj_weight, k_proj_weight, v_proj_weight]
        else:
            assert in_proj_weight is not None
            weights = list(in_proj_weight.chunk(3))
        biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))

        def heads(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            # [N, *, C] -> [*, H, N, C / H]
            assert weight is not None
            return linear(x, weight, bias).unflatten(-1, (num_heads, -1)).movedim(0, -2)

        if is_causal:
            attn_mask = None  # which says the same
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = ~attn_mask  # here True means to leave out
            if attn_mask.dim() == 3 and query.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (-1, num_heads))
        q, k, v = map(heads, (query, key, value), weights, biases)
        mixed = self.attend(q, k, v, attn_mask, dropout_p if training else 0.0, is_causal, keys=keys)
        return linear(mixed.movedim(-2, 0).flatten(-2), out_proj_weight, out_proj_bias), None


def _nothing(module: nn.Module, inputs: Any) -> None:
    """A hook that does nothing."""
