"""Fine-tuning of a part of the parameters: low-rank adapters (LoRA, Hu et al. 2021) and frozen parts.

An adapter is a PyTorch parametrization of a layer's ``weight``. The layer and fused operators that read the weight get
the sum of base and adapter, and gradients flow to the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from fastfold.errors import ConfigError, suggest
from fastfold.evoformer.weights.adapters import LowRankUpdate
from fastfold.kernels.common.scratch import without_autocast
from fastfold.utils.module_structure import exchange_modules, move_into


class LowRank(nn.Module):
    """Weight ``W [c_out, c_in]`` plus a product of rank ``r``: ``W + alpha / rank * B A``.

    ``A [r, c_in]`` starts random and ``B [c_out, r]`` with zeros, so that the sum starts as ``W``, whose dtype and
    device they have. ``r`` is the requested rank, or the smaller side of ``W`` if that is less.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.scale = alpha / rank
        self.a = nn.Parameter(weight.new_empty(min(rank, rows, columns), columns))
        self.b = nn.Parameter(weight.new_zeros(rows, len(self.a)))
        bound = 1 / math.sqrt(columns)
        nn.init.uniform_(self.a, -bound, bound)

    @without_autocast
    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight ``[c_out, c_in]``, in the precision of ``weight`` also under autocast."""
        return weight + self.scale * (self.b @ self.a)


def add_lora(
    model: nn.Module, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = ("attention", "transition")
) -> list[str]:
    """Add adapters to linear layers, freeze all other parameters, and return the layers' names.

    The network's results are unchanged until the adapters are trained. In its state dict ``LAYER.weight`` becomes
    ``LAYER.parametrizations.weight.original``, with ``LAYER.parametrizations.weight.0.a`` and ``.b`` next to it. All
    other names are kept.

    Args:
        model: Any network; changed in place.
        rank: Rank of the adapters.
        alpha: Adapters are scaled by ``alpha / rank``.
        targets: A linear layer gets an adapter if a part of its name, between dots, contains one of these words.
            ``evoformer.blocks.0.msa_row_attention.pair_bias`` contains ``attention``. Layers with a frozen weight are
            skipped.

    Raises:
        ConfigError: The rank is less than 1, a target matches no layer's name, all matching layers are frozen, or the
            network has adapters already.
    """
    if rank < 1:
        raise ConfigError(f"the rank of adapters must be at least 1, got {rank}")
    if _adapted(model):
        raise ConfigError("the network has adapters already; merge them first")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    adapted: dict[str, nn.Linear] = {}
    for target in targets:
        matching = {name: layer for name, layer in layers.items() if target and target in name}
        if not matching:
            parts = {part for name in layers for part in name.split(".") if not part.isdecimal()}
            raise ConfigError(_unknown("no linear layer's name contains", target, parts))
        adapted |= {name: layer for name, layer in matching.items() if layer.weight.requires_grad}
    if not adapted:
        raise ConfigError(
            f"all layers of {', '.join(targets)} are frozen, so none can get an adapter; freeze less"
        )
    model.requires_grad_(False)
    for layer in adapted.values():
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank, alpha))
    return [name for name in layers if name in adapted]


def merge_lora(model: nn.Module) -> nn.Module:
    """Replace each adapted weight by its sum in place, which gives a plain network with the original names.

    Frozen parameters stay frozen. To keep the adapters, merge a copy: ``merge_lora(copy.deepcopy(model))``. The result
    is the same network, but a single layer is replaced.
    """
    adapted = set(_adapted(model))
    return exchange_modules(model, lambda part: _merged(part) if part in adapted else part)


def _merged(layer: Any) -> nn.Module:
    """Return the plain layer of a layer with an adapter, which takes over its attributes."""
    weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    # parametrize.remove_parametrizations changes the layer's class, which copies of the layer share.
    plain: nn.Module = move_into(parametrize.type_before_parametrizations(layer), layer)
    del plain.parametrizations
    # Register the weight first, because the order of names decides the bytes of a weights file.
    bias = plain._parameters.pop("bias")
    plain.register_parameter("weight", weight)
    plain.register_parameter("bias", bias)
    return plain


def lora_updates(model: nn.Module) -> dict[str, LowRankUpdate]:
    """Return the adapters of a network by layer, for :func:`fastfold.evoformer.weights.adapters.write_adapter`."""
    updates = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and parametrize.is_parametrized(layer, "weight"):
            low_rank = layer.get_submodule("parametrizations.weight.0")
            assert isinstance(low_rank, LowRank)
            updates[name] = LowRankUpdate(low_rank.a.detach(), low_rank.b.detach(), low_rank.scale)
    return updates


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Exclude parameters of a network from training, and return their names.

    Patterns are shell patterns of names, such as ``evoformer.*`` or ``*.norm.weight``; ``*`` also matches dots.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen: list[str] = []
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(_unknown("no parameter's name matches", pattern, _patterns(parameters)))
        frozen += matched
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigError(f"nothing is left to train when {', '.join(patterns)} are frozen; freeze less")
    return list(dict.fromkeys(frozen))


def _adapted(model: nn.Module) -> list[nn.Linear]:
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return [layer for layer in layers if parametrize.is_parametrized(layer, "weight")]


def _patterns(names: Collection[str]) -> set[str]:
    """Return parameter names, and the pattern of every module above them."""
    above = (name.split(".")[:depth] for name in names for depth in range(1, name.count(".") + 1))
    return {*names, *(".".join(parts) + ".*" for parts in above)}


def _unknown(problem: str, name: str, known: set[str]) -> str:
    return f"{problem} {name!r}; {suggest(name, known, cutoff=0.4)}"
