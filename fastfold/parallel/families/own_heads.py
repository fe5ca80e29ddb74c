"""An attention module of any class with the heads of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fastfold.parallel.comm.collectives import all_reduce_gradient
from fastfold.parallel.families.linear_kinds import cut_linear, features
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.layout import Partition
from fastfold.parallel.tensor_parallel.linear import ParallelLinear
from fastfold.parallel.tensor_parallel.randomness import draws, own_randomness
from fastfold.utils.module_structure import shallow_copy


class SummedGradients(nn.Module):
    """A whole layer that every rank applies to its own heads: its gradient is summed over the ranks."""

    def __init__(self, plain: nn.Module, mesh: ParallelMesh) -> None:
        super().__init__()
        self.plain, self._group = plain, mesh.group("tp")

    def to_plain(self) -> nn.Module:
        """Return the layer."""
        return self.plain

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        summed = {name: all_reduce_gradient(p, self._group) for name, p in self.plain.named_parameters()}
        return functional_call(self.plain, summed, args, kwargs)


@dataclass(frozen=True)
class OwnHeads:
    """Function that makes this rank's heads of an attention module, for ``layers=``.

    The forward pass is the plain one's, with layers and numbers of heads of this rank.

    Raises:
        ConfigError: There are fewer heads than ranks.
    """

    heads: int  #: Number of heads that may be split: those of keys where queries have more
    inputs: Mapping[str, int]  #: Layers of queries, keys and values, and how often each repeats all heads
    outputs: tuple[str, ...]  #: Layers whose input are the joined heads
    shared: tuple[str, ...] = ()  #: Layers that act on each head alone, with the same weights
    #: Attributes that are the number of heads or of the channels of all heads, which the forward pass reads
    sizes: tuple[str, ...] = ()

    def __call__(self, plain: nn.Module, mesh: ParallelMesh) -> nn.Module:
        """Return this rank's heads of a plain module."""
        ranks, rank = mesh.group("tp").size, mesh.group("tp").rank
        own: Any = shallow_copy(plain)
        for name, repeats in self.inputs.items():
            layer = plain.get_submodule(name)
            width = features(layer)[1] // (self.heads * repeats)
            parts = Partition.heads(self.heads, width, ranks, repeats)
            setattr(own, name, cut_linear(layer, mesh, "first", out_parts=parts))
        for name in self.outputs:
            layer = plain.get_submodule(name)
            parts = Partition.heads(self.heads, features(layer)[0] // self.heads, ranks)
            setattr(own, name, cut_linear(layer, mesh, "second", in_parts=parts))
        for name in self.shared:
            setattr(own, name, SummedGradients(plain.get_submodule(name), mesh))
        own_heads = len(Partition.even(self.heads, ranks).parts[rank])
        own.whole_sizes = {name: getattr(plain, name) for name in self.sizes}
        for name, size in own.whole_sizes.items():
            setattr(own, name, size // self.heads * own_heads)
        own.tensor_parallel, own.joins_heads = mesh.group("tp"), self.outputs[0]
        own.__class__ = _variant(cast(Any, type(plain)))
        return cast(nn.Module, own)


@cache
def _variant(kind: Any) -> Any:
    """Return a variant of a class for own heads, which draws separate random numbers for them."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and any(draws(part) for part in self.modules())):
            return kind.forward(self, *args, **kwargs)
        device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        with ExitStack() as separate:
            separate.enter_context(own_randomness(self.tensor_parallel, device or torch.device("cpu")))
            # After the heads are joined, all ranks draw the same numbers for one tensor.
            joining = self.get_submodule(self.joins_heads)
            handle = joining.register_forward_pre_hook(lambda *_: separate.close())
            try:
                return kind.forward(self, *args, **kwargs)
            finally:
                handle.remove()

    def to_plain(self: Any) -> nn.Module:
        plain = shallow_copy(self)
        plain.__class__ = kind
        vars(plain).update(self.whole_sizes)
        for name in ("whole_sizes", "tensor_parallel", "joins_heads"):
            delattr(plain, name)
        for name, child in self.named_children():
            if isinstance(child, ParallelLinear | SummedGradients):
                setattr(plain, name, child.to_plain())
        return plain

    return type(f"OwnHeadsOf{kind.__name__}", (kind,), {"forward": forward, "to_plain": to_plain})
