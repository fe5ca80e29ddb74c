"""Sequence parallelism for a module that was written for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fastfold.errors import ConfigError
from fastfold.parallel.checks.sequence import SequenceComparison
from fastfold.parallel.comm.collectives import gather
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.sequence_parallel.attention import ring_attention, ulysses_attention
from fastfold.utils.module_structure import exchange_modules, move_into

METHODS = {"ring": ring_attention, "ulysses": ulysses_attention}


class SequenceParallel:
    """Runs a module on this rank's part of each sequence.

    Operators on single positions need no change; others are refused when they first run. In the named modules, calls of
    ``torch.nn.functional.scaled_dot_product_attention`` and ``nn.MultiheadAttention`` become ring or all-to-all
    attention over the ranks, also when activation checkpointing repeats them; ``torch.compile`` leaves these modules
    out. Tables of learned positions are read from the beginning of the part.

    A named module that calls neither, because its attention is written by hand, would see only its own part: it is
    refused when it runs. Masks are for own queries and all keys ``[..., own, all]``, or for own keys ``[..., 1,
    own]``; ``key_padding_mask`` is for own or all keys. Inputs that :meth:`shard` cuts are recognised.

    Ranks hold the same parameters and use them on different positions. So the gradient of the sum of all ranks' losses
    is the sum of their gradients, as in data parallelism (the group ``replicas`` of a mesh).

    Args:
        module: Any module; changed in place, except that a ``module`` of these classes itself is replaced by the
            attribute ``module``.
        group: The ranks, ``mesh.group("sp")``.
        attention: Classes of the submodules that call attention.
        positions: Embeddings whose input is positions counted from 0.
        method: ``ring`` or ``ulysses``.
        compare_first: Run the module in parts and as a whole before its first call, at every new length, and after a
            call with operators that were not compared. Refuse it if the results differ, naming the operator.

    Raises:
        ConfigError: The method is unknown, the module has no submodule of these classes, or was made parallel before.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.parallel import ParallelPlan, SequenceParallel
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> layer = nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True)
        >>> x = torch.randn(2, 10, 16)
        >>> with fake_mesh(ParallelPlan(sp=4), rank=1) as mesh:  # simulates one of four ranks
        ...     sequence = SequenceParallel(layer, mesh.group("sp"), attention=nn.MultiheadAttention)
        ...     own = sequence.shard(x, dim=1)
        ...     torch.equal(own, x[:, 3:6]), sequence(own).shape
        (True, torch.Size([2, 3, 16]))
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        attention: type[nn.Module] | tuple[type[nn.Module], ...],
        positions: Iterable[nn.Embedding] = (),
        method: str = "ring",
        compare_first: bool = True,
    ) -> None:
        if method not in METHODS:
            raise ConfigError(f"sequence parallelism: expected one of {', '.join(METHODS)}, found {method!r}")
        self.group, self.method = group, method
        self.sizes: list[int] | None = None
        self.is_whole = False
        """True while every rank runs a whole sequence, for a comparison."""
        self._comparison = SequenceComparison(group, self._laid_out, self._sizes)
        layers = {child for child in module.modules() if isinstance(child, attention)}
        if not layers:
            kinds = attention if isinstance(attention, tuple) else (attention,)
            raise ConfigError(
                f"{type(module).__name__} has no submodule of {' or '.join(kind.__name__ for kind in kinds)}: name the "
                "classes that call attention, or use dp or tp instead of sp"
            )
        # A layer around others of these classes calls attention through them.
        layers = {x for x in layers if not any(part in layers for part in x.modules() if part is not x)}
        if any(hasattr(layer, "sequence") for layer in layers):
            raise ConfigError("sequence parallelism: the module is parallel already; apply it once")
        self.module = exchange_modules(module, lambda part: self._spread(part) if part in layers else part)
        for encoder in self.module.modules():
            if isinstance(encoder, nn.TransformerEncoder):
                # Sequences packed without their padding cannot be spread over the ranks.
                encoder.use_nested_tensor = False
        for table in positions:
            table.register_forward_pre_hook(lambda _, inputs: (inputs[0] + self.first, *inputs[1:]))
        if compare_first:
            self._comparison.attach(self.module)

    def _spread(self, layer: nn.Module) -> nn.Module:
        """Return a layer with attention over the ranks, which takes over the attributes of ``layer``."""
        kind: Any = type(layer)
        variant: Any = move_into(_parallel_variant(kind), layer)
        variant.sequence = self
        # PyTorch's fused encoder layer, which calls no attention, skips modules with a hook.
        variant.register_forward_pre_hook(lambda *_: None)
        return variant

    @property
    def first(self) -> int:
        """Position of the first element of this rank's part."""
        return 0 if self.is_whole else sum(self._sizes()[: self.group.rank])

    def shard(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's part of whole sequences; the module's next call uses sequences of this length.

        The sequences ``[..., L, ...]`` are the same on every rank, with positions along ``dim``.
        """
        self.sizes = shard_sizes(x.shape[dim], self.group.size)
        part = x.narrow(dim, self.first, self.sizes[self.group.rank]).contiguous()
        self._comparison.note(part, dim)
        return part

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def _laid_out(self, sizes: Sequence[int] | None) -> Iterator[None]:
        before = self.sizes, self.is_whole
        self.sizes, self.is_whole = self.sizes if sizes is None else list(sizes), sizes is None
        try:
            yield
        finally:
            self.sizes, self.is_whole = before

    def _sizes(self) -> list[int]:
        if self.sizes is None:
            raise ConfigError(
                "sequence parallelism does not know the length of the sequences: call shard first"
            )
        return self.sizes

    def attention(self) -> _SequenceAttention:
        """Return a context in which PyTorch's attention is that of this rank's part."""
        return _SequenceAttention(self)

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceParallel:
        # A copy of the module (such as an average of weights) works on the same sequences.
        return self


@cache
def _parallel_variant(layer: Any) -> Any:
    """Return a variant of a class with attention over the ranks; copies keep it, unlike a wrapped method."""

    @torch.compiler.disable(reason="attention over the ranks sends messages, which cannot be traced")
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.sequence.attention() as attention:
            result = layer.forward(self, *args, **kwargs)
        if not attention.calls:
            raise ConfigError(
                f"sequence parallelism: {layer.__name__} called no attention that can be spread over the ranks, so "
                "each position saw only this rank's part; let it call "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        return result

    return type(f"Sequence{layer.__name__}", (layer,), {"forward": forward})


class _SequenceAttention(TorchFunctionMode):
    """Replaces PyTorch's attention by attention over the ranks, except while every rank runs the whole."""

    def __init__(self, sequence: SequenceParallel) -> None:
        super().__init__()
        self.sequence, self.group, self.sizes = sequence, sequence.group, sequence._sizes()
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in (scaled_dot_product_attention, multi_head_attention_forward):
            return func(*args, **(kwargs or {}))
        self.calls += 1
        with self.sequence._comparison.paused():
            if self.sequence.is_whole:
                return func(*args, **(kwargs or {}))
            if func is scaled_dot_product_attention:
                return self.attend(*args, **(kwargs or {}))
            bound = signature(multi_head_attention_forward).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            return self.attend_heads(SimpleNamespace(**bound.arguments))

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
        """Compute PyTorch's attention of ``[*, H, N, D]``; ``attn_mask`` is for own queries and all keys.

        ``keys`` ``[*, N]`` is True for own keys to use.
        """
        if dropout_p or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise ConfigError(
                "sequence parallel attention expects no dropout of its weights, and keys and values with as many "
                "channels as queries"
            )
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        own, whole = self.sizes[self.group.rank], sum(self.sizes)
        if attn_mask is not None and attn_mask.shape[-2:] == (1, own) and keys is None and own != whole:
            keys, attn_mask = _key_mask(attn_mask), None
        shape = () if attn_mask is None else attn_mask.shape
        if any(n not in (1, size) for n, size in zip(reversed(shape), (whole, own), strict=False)):
            raise ConfigError(
                f"sequence parallelism: expected a mask [..., {own}, {whole}] for own queries and all keys, found "
                f"{list(shape)}; give masks of padding for all positions, and cut only the queries of others by shard()"
            )
        # [*, H, N, D] -> [*, 1, N, H, D]
        q, k, v = (x.transpose(-3, -2).unsqueeze(-4) for x in (query, key, value))
        bias = None
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
            bias = attn_mask.expand(*query.shape[:-1], whole)
        # A query whose keys are all masked gets zeros, as from PyTorch.
        unseen = self._unseen(bias, keys, is_causal)
        if bias is not None and unseen is not None:
            bias = bias.masked_fill(unseen, 0)
        mask = None if keys is None else keys.expand(*query.shape[:-3], own).unsqueeze(-2)
        mixed = METHODS[self.sequence.method](
            q, k, v, bias, mask, group=self.group, sizes=self.sizes, causal=is_causal, scale=scale
        )
        mixed = mixed.squeeze(-4).transpose(-3, -2)
        return mixed if unseen is None else mixed.masked_fill(unseen, 0)

    def _unseen(self, bias: Tensor | None, keys: Tensor | None, is_causal: bool) -> Tensor | None:
        """Return True for own queries that see no key, ``[*, H or 1, Nq or 1, 1]``; None without masks.

        ``bias [*, H, Nq, N]`` is minus infinity for hidden keys of all ranks, and ``keys [*, Nk]`` True for own keys to
        use.
        """
        hidden = None if bias is None else bias == -torch.inf
        if keys is not None:
            visible = gather(keys, -1, self.group, self.sizes)
            if is_causal:
                first = sum(self.sizes[: self.group.rank])
                earlier = visible.cumsum(-1).narrow(-1, first, self.sizes[self.group.rank])
                return (earlier == 0)[..., None, :, None]
            masked = ~visible[..., None, None, :]
            hidden = masked if hidden is None else hidden | masked
        return None if hidden is None else hidden.all(-1, keepdim=True)

    def attend_heads(self, call: SimpleNamespace) -> tuple[Tensor, None]:
        """Compute ``nn.MultiheadAttention`` of own positions ``[N, B, C]`` or ``[N, C]``.

        ``call`` has the arguments of ``torch.nn.functional.multi_head_attention_forward``.
        """
        extras = ("bias_k", "bias_v", "static_k", "static_v")
        unsupported = [name for name in extras if getattr(call, name) is not None]
        unsupported += ["add_zero_attn"] * call.add_zero_attn
        if unsupported:
            raise ConfigError(
                f"sequence parallelism: nn.MultiheadAttention with {unsupported[0]} is not supported"
            )
        if call.need_weights:
            raise ConfigError(
                "sequence parallelism: no rank has all weights of attention; call nn.MultiheadAttention with "
                "need_weights=False"
            )
        keys, padding = None, call.key_padding_mask
        if padding is not None:
            if padding.shape[-1] == sum(self.sizes):
                first = sum(self.sizes[: self.group.rank])
                padding = padding.narrow(-1, first, self.sizes[self.group.rank])
            keys = padding == 0  # True or minus infinity masks a key
            if padding.dtype != torch.bool and not (keys | padding.isneginf()).all():
                raise ConfigError("sequence parallelism: key_padding_mask must be 0 or minus infinity")
        if call.use_separate_proj_weight:
            weights = [call.q_proj_weight, call.k_proj_weight, call.v_proj_weight]
        else:
            weights = list(call.in_proj_weight.chunk(3))
        biases = [None] * 3 if call.in_proj_bias is None else list(call.in_proj_bias.chunk(3))

        def heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            # [N, *, C] -> [*, H, N, C / H]
            return linear(x, weight, bias).unflatten(-1, (call.num_heads, -1)).movedim(0, -2)

        mask = None if call.is_causal else call.attn_mask  # is_causal says the same
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = ~mask  # True masks a key here
            if mask.dim() == 3 and call.query.dim() == 3:
                mask = mask.unflatten(0, (-1, call.num_heads))
        q, k, v = map(heads, (call.query, call.key, call.value), weights, biases)
        dropout = call.dropout_p if call.training else 0.0
        mixed = self.attend(q, k, v, mask, dropout, call.is_causal, keys=keys)
        mixed = mixed.movedim(-2, 0).flatten(-2)
        return linear(mixed, call.out_proj_weight, call.out_proj_bias), None


def _key_mask(mask: Tensor) -> Tensor:
    """Return the own keys to use ``[*, N]`` of a mask ``[*, 1, 1, N]``."""
    if mask.dim() > 2 and mask.shape[-3] != 1:
        raise ConfigError(
            f"sequence parallelism: a mask of own keys is the same for all heads, expected [..., 1, 1, keys], found "
            f"{list(mask.shape)}"
        )
    keys = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (keys | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        raise ConfigError("sequence parallelism: a mask of own keys must be 0 or minus infinity")
    return keys[..., 0, 0, :] if mask.dim() > 2 else keys[0]
