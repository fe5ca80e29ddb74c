"""LayerNorm, embedding, two-layer perceptron and self-attention on the ranks of a tensor parallel group."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from fastfold.errors import ConfigError
from fastfold.parallel.checks.plain_layers import require_type
from fastfold.parallel.comm.collectives import all_reduce, gather
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.layout import (
    CutLayer,
    Partition,
    ShardSpec,
    layouts,
    replicated,
    whole,
)
from fastfold.parallel.tensor_parallel.linear import ParallelLinear
from fastfold.parallel.tensor_parallel.randomness import draws, own_randomness


class ParallelLayerNorm(CutLayer):
    """LayerNorm in the outer layout; make one with :meth:`from_plain`.

    Each rank computes mean and squared deviation of its own features. All ranks' are gathered, two numbers for each
    row and rank, and combined as in a parallel variance (Chan et al. 1979), without cancellation. The statistics are
    at least float32. Weight and bias are cut like the features. Their gradients are summed over the ranks with other
    rows.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> from fastfold.parallel.tensor_parallel import ParallelLayerNorm
        >>> plan = ParallelPlan(tp=4, tp_mode="2d")
        >>> with fake_mesh(plan) as mesh, mesh.record() as log:  # simulates one of 2 x 2 ranks
        ...     own = ParallelLayerNorm.from_plain(nn.LayerNorm(16), mesh)
        ...     y = own(torch.randn(6, 8))  # this rank's rows and features
        >>> own.weight.shape, y.shape, {(message.op, message.group) for message in log.entries}
        (torch.Size([8]), torch.Size([6, 8]), {('all_gather', 'tp_row')})
    """

    def __init__(self, norm: nn.LayerNorm, mesh: ParallelMesh) -> None:
        super().__init__()
        if len(norm.normalized_shape) != 1:
            raise ConfigError(
                f"cannot split LayerNorm over {tuple(norm.normalized_shape)}; expected one over the last dimension"
            )
        self.layout, _ = layouts(mesh)
        self.parts = Partition.even(norm.normalized_shape[0], self.layout.features.size)
        self.eps = norm.eps
        specs = [ShardSpec(0, self.layout.features, self.parts.sizes)]
        self._cut("weight", norm.weight, specs)
        self._cut("bias", norm.bias, specs)

    @classmethod
    def from_plain(cls, norm: nn.LayerNorm, mesh: ParallelMesh) -> ParallelLayerNorm:
        """Return this rank's part of a plain layer.

        Raises:
            ConfigError: The layer normalises more than the last dimension, or is of a subclass.
        """
        require_type(norm, nn.LayerNorm, "ParallelLayerNorm")
        return cls(norm, mesh)

    def to_plain(self) -> nn.LayerNorm:
        """Return the plain layer, gathered on every rank (a collective)."""
        norm = nn.LayerNorm(sum(self.parts.sizes), self.eps, self.weight is not None, self.bias is not None)
        norm.register_parameter("weight", self._whole("weight"))
        norm.register_parameter("bias", self._whole("bias"))
        return norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, ``[batch, ..., features]`` in the outer layout."""
        weight = None if self.weight is None else replicated(self.weight, self.layout.rows)
        bias = None if self.bias is None else replicated(self.bias, self.layout.rows)
        group = self.layout.features
        if group.size == 1:
            return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        counts = wide.new_tensor(self.parts.sizes).view(-1, *[1] * (x.dim() - 1))
        # A rank without features counts zero features with mean 0.
        own_mean = wide.sum(-1) / max(x.shape[-1], 1)
        own_square = (wide - own_mean[..., None]).square().sum(-1)
        means, squares = gather(torch.stack([own_mean, own_square])[None], 0, group).unbind(1)
        mean = (means * counts).sum(0) / sum(self.parts.sizes)
        square = (squares + counts * (means - mean).square()).sum(0)
        scale = (square / sum(self.parts.sizes) + self.eps).rsqrt()
        y = (wide - mean[..., None]) * scale[..., None]
        if weight is not None:
            y = y * weight
        return (y if bias is None else y + bias).to(x.dtype)


class ParallelEmbedding(CutLayer):
    """A table ``[vocabulary, features]``, looked up into the outer layout; make one with :meth:`from_plain`.

    In 1d the vocabulary is cut: a rank looks up its own entries and zeros for the others, and the result is the sum
    over the ranks. In the other modes features are cut like the activations, and the vocabulary over the innermost
    group of rows. The table is gathered along that group for the lookup, and its gradient is reduce-scattered.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> from fastfold.parallel.tensor_parallel import ParallelEmbedding
        >>> plain = nn.Embedding(10, 8)
        >>> with fake_mesh(ParallelPlan(tp=4), rank=1) as mesh:  # simulates one of four ranks
        ...     own = ParallelEmbedding.from_plain(plain, mesh)
        >>> torch.equal(own.weight, plain.weight[3:6])
        True
    """

    def __init__(self, embedding: nn.Embedding, mesh: ParallelMesh) -> None:
        super().__init__()
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ConfigError(
                "cannot split an embedding with max_norm, scale_grad_by_freq or sparse gradients; leave it out of "
                "layers="
            )
        outer, inner = layouts(mesh)
        self.layout = outer
        self.masked = not outer.rows
        # In 1d the activations are whole; the ranks that share the table are those of the inner layout.
        self.vocabulary_group = inner.features if self.masked else outer.rows[-1]
        self.sizes = shard_sizes(embedding.num_embeddings, self.vocabulary_group.size)
        self.parts = Partition.even(embedding.embedding_dim, outer.features.size)
        self.padding_idx = embedding.padding_idx
        specs = [
            ShardSpec(0, self.vocabulary_group, self.sizes),
            ShardSpec(1, outer.features, self.parts.sizes),
        ]
        self._cut("weight", embedding.weight, specs)

    @classmethod
    def from_plain(cls, embedding: nn.Embedding, mesh: ParallelMesh) -> ParallelEmbedding:
        """Return this rank's part of a plain table.

        Raises:
            ConfigError: The table has an option that its parts cannot keep, or is of a subclass.
        """
        require_type(embedding, nn.Embedding, "ParallelEmbedding")
        return cls(embedding, mesh)

    def to_plain(self) -> nn.Embedding:
        """Return the plain table, gathered on every rank (a collective)."""
        weight = whole(self.weight, self._specs["weight"])
        return nn.Embedding.from_pretrained(
            weight, freeze=not self.weight.requires_grad, padding_idx=self.padding_idx
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ``ids [batch, ...]``, this rank's rows; return ``[batch, ..., features]``.

        The result is in the outer layout.

        Raises:
            IndexError: An id is not in the vocabulary. On a GPU it ends the process, as in ``nn.Embedding``.
        """
        if not self.masked:
            table = gather(
                replicated(self.weight, self.layout.rows[:-1]), 0, self.vocabulary_group, self.sizes
            )
            return F.embedding(ids, table, self.padding_idx)
        start = sum(self.sizes[: self.vocabulary_group.rank])
        self._check_ids(ids)
        held = (ids >= start) & (ids < start + self.weight.shape[0])
        # Entries of other ranks use an additional row of zeros, which gets no gradient.
        table = torch.cat([self.weight, self.weight.new_zeros(1, self.weight.shape[1])])
        own = torch.where(held, ids - start, self.weight.shape[0])
        padding = -1 if self.padding_idx is None else self.padding_idx - start
        inside = padding if 0 <= padding < self.weight.shape[0] else None
        return all_reduce(F.embedding(own, table, inside), self.vocabulary_group)

    def _check_ids(self, ids: Tensor) -> None:
        """Refuse ids outside of the vocabulary; no rank holds them, so they would become zeros."""
        rows = sum(self.sizes)
        inside = (ids >= 0) & (ids < rows)
        if ids.device.type == "cuda":
            torch._assert_async(inside.all())
        elif not ids.is_meta and not isinstance(ids, FakeTensor) and not bool(inside.all()):
            wrong = int(ids[~inside].flatten()[0])
            raise IndexError(f"expected ids from 0 to {rows - 1} of the vocabulary, found {wrong}")


class ParallelMLP(nn.Module):
    """Linear, activation, linear; from the outer layout to the outer layout. Make one with :meth:`from_plain`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> from fastfold.parallel.tensor_parallel import ParallelMLP
        >>> plain = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> with fake_mesh(ParallelPlan(tp=4)) as mesh, mesh.record() as log:  # simulates one of four ranks
        ...     own = ParallelMLP.from_plain(plain, mesh)
        ...     y = own(torch.randn(2, 8))
        >>> own.first.weight.shape, y.shape, [message.op for message in log.entries]
        (torch.Size([8, 8]), torch.Size([2, 8]), ['all_reduce'])
    """

    def __init__(
        self, first: ParallelLinear, activation: nn.Module, second: ParallelLinear, group: Group
    ) -> None:
        super().__init__()
        self._group = group
        self.first, self.activation, self.second = first, activation, second

    @classmethod
    def from_plain(cls, mlp: nn.Sequential, mesh: ParallelMesh) -> ParallelMLP:
        """Return this rank's part of ``nn.Sequential(nn.Linear, activation, nn.Linear)``.

        Raises:
            ConfigError: The modules are others, or the activation is not elementwise: it has parameters of its own
                (``nn.PReLU``), or combines several features (``nn.Softmax``).
        """
        require_type(mlp, nn.Sequential, "ParallelMLP")
        modules = list(mlp)
        first, second = modules[0], modules[-1]
        if len(modules) != 3 or not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
            names = ", ".join(type(module).__name__ for module in modules)
            raise ConfigError(f"a parallel MLP expects Linear, an activation and Linear, found {names}")
        _check_elementwise(modules[1])
        return cls(
            ParallelLinear.from_plain(first, mesh, "first"),
            modules[1],
            ParallelLinear.from_plain(second, mesh, "second"),
            mesh.group("tp"),
        )

    def to_plain(self) -> nn.Sequential:
        """Return the plain modules, gathered on every rank (a collective)."""
        return nn.Sequential(self.first.to_plain(), self.activation, self.second.to_plain())

    def forward(self, x: Tensor, row_sizes: Sequence[int] | None = None) -> Tensor:
        """Apply to ``x`` ``[batch, ..., features]``; ``row_sizes`` as in :meth:`ParallelLinear.forward`.

        Dropout of the activation draws different numbers on each rank.
        """
        hidden = self.first(x, row_sizes)
        if self.training and any(draws(module) for module in self.activation.modules()):
            with own_randomness(self._group, hidden.device):
                hidden = self.activation(hidden)
        else:
            hidden = self.activation(hidden)
        return self.second(hidden, row_sizes)


@torch.no_grad()
def _check_elementwise(activation: nn.Module) -> None:
    """Refuse an activation whose result depends on the cut of the features."""
    name = type(activation).__name__
    if next(activation.parameters(), None) is not None:
        raise ConfigError(
            f"a parallel MLP cannot cut the parameters of its activation {name}, which would become different on the "
            "ranks; use an activation without parameters"
        )
    with unset_fake_temporarily():  # fake tensors hold only shapes
        x = torch.linspace(-3, 3, 24).reshape(3, 8)
        try:
            probed = copy.deepcopy(activation).to("cpu").eval()
            whole, parts = probed(x), torch.cat([probed(part) for part in x.split(4, -1)], -1)
            alike = whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-5, atol=1e-6)
        except (RuntimeError, IndexError, ValueError):
            alike = False
    if not alike:
        raise ConfigError(
            f"a parallel MLP needs an elementwise activation, and {name} combines several features, which are cut over "
            "the ranks"
        )


class ParallelAttention(nn.Module):
    """Self-attention from the outer layout to the outer layout; make one with :meth:`from_plain`.

    One linear layer computes queries, keys and values; it is cut so that each rank gets all three of its heads. The
    attention itself communicates nothing, because batch and heads are split and the sequence is whole.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.parallel import ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> from fastfold.parallel.tensor_parallel import ParallelAttention
        >>> plain = nn.MultiheadAttention(16, num_heads=4, batch_first=True)
        >>> with fake_mesh(ParallelPlan(tp=4)) as mesh, mesh.record() as log:  # simulates one of four ranks
        ...     own = ParallelAttention.from_plain(plain, mesh)
        ...     y, _ = own(torch.randn(2, 5, 16), need_weights=False)
        >>> plain.in_proj_weight.shape, own.inputs.weight.shape  # a head of queries, keys and values
        (torch.Size([48, 16]), torch.Size([12, 16]))
        >>> y.shape, [message.op for message in log.entries]
        (torch.Size([2, 5, 16]), ['all_reduce'])
    """

    def __init__(self, inputs: ParallelLinear, output: ParallelLinear, heads: int, width: int) -> None:
        super().__init__()
        self.inputs, self.output = inputs, output
        self.heads, self.width = heads, width

    @classmethod
    def from_plain(cls, attention: nn.MultiheadAttention, mesh: ParallelMesh) -> ParallelAttention:
        """Return this rank's heads of a plain layer.

        Raises:
            ConfigError: The layer is of a subclass, has other key or value widths, extra keys or dropout, is not
                ``batch_first``, or has fewer heads than there are ranks to split them over.
        """
        require_type(attention, nn.MultiheadAttention, "ParallelAttention")
        if (
            not attention._qkv_same_embed_dim
            or attention.bias_k is not None
            or attention.add_zero_attn
            or attention.dropout
            or not attention.batch_first
        ):
            raise ConfigError(
                "parallel attention expects a MultiheadAttention with batch_first=True, equal key and value "
                "widths, no extra keys and no dropout"
            )
        _, inner = layouts(mesh)
        heads, width = attention.num_heads, attention.head_dim
        ranks = inner.features.size
        inputs = ParallelLinear.from_plain(
            _linear(attention.in_proj_weight, attention.in_proj_bias),
            mesh,
            "first",
            out_parts=Partition.heads(heads, width, ranks, 3),
        )
        output = ParallelLinear.from_plain(
            _linear(attention.out_proj.weight, attention.out_proj.bias),
            mesh,
            "second",
            in_parts=Partition.heads(heads, width, ranks),
        )
        return cls(inputs, output, heads, width)

    def to_plain(self) -> nn.MultiheadAttention:
        """Return the plain layer, gathered on every rank (a collective)."""
        joint, output = self.inputs.to_plain(), self.output.to_plain()
        attention = nn.MultiheadAttention(
            self.heads * self.width, self.heads, bias=self.inputs.bias is not None, batch_first=True
        )
        attention.in_proj_weight, attention.in_proj_bias = cast(nn.Parameter, joint.weight), joint.bias
        attention.out_proj.weight, attention.out_proj.bias = output.weight, output.bias
        return attention

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        *,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        row_sizes: Sequence[int] | None = None,
    ) -> tuple[Tensor, None]:
        """Attend within each sequence, with the arguments of ``nn.MultiheadAttention``.

        Args:
            query: ``[batch, L, features]``, this rank's block in the outer layout.
            key: The same tensor as ``query``, or None.
            value: The same tensor as ``query``, or None.
            key_padding_mask: Keys to leave out (True or minus infinity), ``[batch, L]``.
            need_weights: Expected False, since no rank has the weights of all heads.
            attn_mask: Keys to leave out (True), or added to the scores, ``[L, L]``.
            average_attn_weights: Not used.
            is_causal: True if ``attn_mask`` hides later positions and no others.
            row_sizes: As in :meth:`ParallelLinear.forward`.

        Returns:
            ``[batch, L, features]`` in the outer layout, and None.

        Raises:
            ConfigError: Keys or values are others than the queries, weights are asked for, or a mask is missing or has
                another shape.
        """
        if any(x is not None and x is not query for x in (key, value)):
            raise ConfigError(
                "parallel attention expects one tensor as query, key and value: leave it out of layers="
            )
        if need_weights:
            raise ConfigError(
                "parallel attention returns no weights, since no rank has all heads: call nn.MultiheadAttention "
                "with need_weights=False"
            )
        if is_causal and attn_mask is None:
            raise ConfigError(
                "parallel attention expects attn_mask with is_causal, as nn.MultiheadAttention does"
            )
        is_causal = is_causal and key_padding_mask is None
        bias = None if is_causal else _bias(attn_mask, key_padding_mask, query)
        joint = self.inputs(query, row_sizes)
        # [batch, L, 3 * heads * width] -> 3 x [batch, heads, L, width]
        queries, keys, values = torch.unflatten(joint, -1, (3, -1, self.width)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, is_causal=is_causal)
        return self.output(mixed.transpose(1, 2).flatten(2), row_sizes), None


def _bias(mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the bias of the scores for PyTorch's masks, in which True hides a key; broadcasts to ``[B, H, L, L]``."""
    if mask is not None and mask.dim() > 2:
        raise ConfigError(
            f"parallel attention expects attn_mask of shape [L, L], found {list(mask.shape)}; leave this layer out of "
            "layers="
        )
    parts = [] if mask is None else [mask]
    if padding is not None:
        parts.append(padding[:, None, None, :])
    total: Tensor | None = None
    for part in parts:
        if part.dtype == torch.bool:
            part = torch.zeros_like(part, dtype=like.dtype).masked_fill(part, -torch.inf)
        total = part if total is None else total + part
    return total


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = cast(nn.Parameter, weight)
    if bias is not None:
        linear.bias = cast(nn.Parameter, bias)
    return linear
