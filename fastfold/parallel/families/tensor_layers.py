"""Layers that tensor parallelism cuts: by patterns of paths, or found in the model by ``layers="auto"``.

A model's ``tp_plan`` is used if it has one, as most families of transformers do. Otherwise the layers come from
structure: attention with a number of heads, and pairs of linear layers. Both are compared with the plain layers at
their first call.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn

from fastfold.errors import ConfigError, suggest
from fastfold.parallel.comm.collectives import gather
from fastfold.parallel.data_parallel.full_state import ShardFn
from fastfold.parallel.families.linear_kinds import cut_linear, features, is_linear, is_transposed
from fastfold.parallel.families.own_heads import OwnHeads, SummedGradients
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.tensor_parallel.layers import ParallelEmbedding
from fastfold.parallel.tensor_parallel.layout import Partition
from fastfold.parallel.tensor_parallel.linear import Role
from fastfold.utils.module_structure import is_inside, joined

Layers = Mapping[str, ShardFn] | Literal["auto"] | None
"""Argument ``layers`` of :func:`fastfold.parallel.parallelize`."""

_GATHERED = "colwise_gather_output"
_STYLES = (
    "colwise",
    "rowwise",
    "packed_colwise",
    _GATHERED,
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
)
"""Styles of a ``tp_plan`` with a counterpart."""
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
_REMEDY = "give layers={pattern: function}, or use dp, zero or pp instead of tp"


def find_cuts(
    model: nn.Module, plan: ParallelPlan, layers: Layers, tied: Sequence[Sequence[str]]
) -> dict[str, ShardFn]:
    """Return the functions of replaced layers, by path; the outermost matching module wins.

    ``tied`` has the names of each parameter that has several.

    Raises:
        ConfigError: ``layers`` lacks layers, or has a pattern of none.
    """
    if plan.tp == 1:
        return {}
    if not layers:
        raise ConfigError(
            f"tp={plan.tp} needs to know which layers of {type(model).__name__} are cut: give "
            'layers={pattern: function}, or layers="auto" for a model of transformers'
        )
    if isinstance(layers, str):
        layers = find_layers(model, plan, tied)
    paths = [path for path, _ in model.named_modules() if path]
    cuts: dict[str, ShardFn] = {}
    for pattern, shard_fn in layers.items():
        matching = fnmatch.filter(paths, pattern)
        if not matching:
            hint = suggest(pattern, paths, cutoff=0.0)
            raise ConfigError(f"layers=: no module of {type(model).__name__} is called {pattern}; {hint}")
        for path in matching:  # outer modules precede their children
            if not any(is_inside(path, outer) for outer in cuts if outer != path):
                cuts[path] = shard_fn
    if plan.tp_mode != "1d":
        left = [
            name for name, _ in model.named_parameters() if not any(is_inside(name, path) for path in cuts)
        ]
        if left:
            raise ConfigError(
                f"tp={plan.tp_mode} splits batch and features, so every layer has to be replaced; layers= lacks "
                f"{', '.join(left[:3])}{' ...' if len(left) > 3 else ''}"
            )
    return cuts


def find_layers(model: nn.Module, plan: ParallelPlan, tied: Sequence[Sequence[str]]) -> dict[str, ShardFn]:
    """Return the functions that cut a model's layers, by path; see :func:`find_cuts`.

    Raises:
        ConfigError: The plan is not 1d, or no layer can be cut; the message names the reason.
    """
    if plan.tp_mode != "1d":
        raise ConfigError(f'layers="auto" finds the layers of tp_mode 1d, found {plan.tp_mode}: {_REMEDY}')
    of_tied, cuts = _cut_tied(model, tied), dict[str, ShardFn]()
    for path, part, styles in _declared(model):
        cuts |= {joined(path, name): cut for name, cut in _of_styles(part, styles).items()}
    cuts = cuts or _of_structure(model)
    if not cuts:
        raise ConfigError(
            f'layers="auto": {type(model).__name__} has no tp_plan, no attention with a number of heads next to its '
            f"linear layers, and no pairs of linear layers: {_REMEDY}"
        )
    return cuts | {path: cut for path, cut in of_tied.items() if path not in cuts}


@dataclass(frozen=True)
class _CutLinear:
    role: Role
    repeats: int = 1  #: Number of joint layers in the output; each is cut

    def __call__(self, layer: nn.Module, mesh: ParallelMesh) -> nn.Module:
        parts = None
        if self.repeats > 1:
            parts = Partition.heads(
                features(layer)[1] // self.repeats, 1, mesh.group("tp").size, self.repeats
            )
        return cut_linear(layer, mesh, self.role, out_parts=parts)


def _cut_table(table: nn.Module, mesh: ParallelMesh) -> nn.Module:
    return ParallelEmbedding.from_plain(cast(nn.Embedding, table), mesh)


def _cut_scores(layer: nn.Module, mesh: ParallelMesh) -> nn.Module:
    """Cut a layer by outputs, which are gathered on every rank for one loss."""
    own = cut_linear(layer, mesh, "first")
    group, sizes = own.after.features, own.out_parts.sizes

    def join(_: nn.Module, __: object, scores: Tensor) -> Tensor:
        return gather(scores, -1, group, sizes, same_after=True)

    own.register_forward_hook(join)
    return own


# ---- by the model's own plan -------------------------------------------------------------------------------


def _declared(model: nn.Module) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """Yield the outermost modules with a ``tp_plan``, and the plans."""
    outer: list[str] = []
    for path, part in model.named_modules():
        styles = getattr(part, "tp_plan", None)
        if (
            isinstance(styles, Mapping)
            and styles
            and not any(path.startswith(f"{x}.") or not x for x in outer)
        ):
            outer.append(path)
            yield path, part, styles


def _of_styles(model: nn.Module, styles: Mapping[str, str]) -> dict[str, ShardFn]:
    """Return the functions for the layers that a ``tp_plan`` names."""
    chosen: dict[str, str] = {}
    parameters = [name for name, _ in model.named_parameters()]
    for pattern, style in styles.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        layers = {path: part for path, part in model.named_modules() if matches(path)}
        if not layers and any(map(matches, parameters)):
            raise ConfigError(
                f'layers="auto": {pattern} of the tp_plan is a parameter outside of a layer: {_REMEDY}'
            )
        for path, layer in layers.items():
            is_known = is_linear(layer) or style in ("embedding_rowwise", "replicated_with_grad_allreduce")
            if style not in _STYLES or not is_known:
                raise ConfigError(
                    f'layers="auto": {path} is {type(layer).__name__} of style {style} in the tp_plan, and known are '
                    f"linear layers of {', '.join(_STYLES)}: {_REMEDY}"
                )
            chosen[path] = style
    cuts: dict[str, ShardFn] = {}
    by_owner: dict[str, dict[str, str]] = {}
    for path, style in chosen.items():
        owner, _, name = path.rpartition(".")
        by_owner.setdefault(owner, {})[name] = style
    for owner, of_one in by_owner.items():
        module = model.get_submodule(owner)
        if isinstance(getattr(module, "head_dim", None), int):
            cuts[owner] = _attention_of_styles(module, of_one)
        else:
            cuts |= {joined(owner, name): _cut_of(style) for name, style in of_one.items()}
    return cuts


def _cut_of(style: str) -> ShardFn:
    if style == "embedding_rowwise":
        return _cut_table
    if style == _GATHERED:
        return _cut_scores
    if style == "replicated_with_grad_allreduce":
        return SummedGradients
    return _CutLinear("second" if style == "rowwise" else "first", 2 if style == "packed_colwise" else 1)


def _attention_of_styles(module: nn.Module, styles: Mapping[str, str]) -> OwnHeads:
    """Return the cut of an attention module by whole heads."""
    kind, width = type(module).__name__, int(module.head_dim)  # type: ignore[arg-type]
    of_style: dict[str, list[str]] = {}
    for name, style in styles.items():
        of_style.setdefault(style, []).append(name)
    inputs, outputs = of_style.pop("colwise", []), of_style.pop("rowwise", [])
    shared = of_style.pop("replicated_with_grad_allreduce", [])
    if of_style or not inputs or not outputs:
        raise ConfigError(
            f'layers="auto": {kind} has layers of {", ".join(styles.values())} in the tp_plan, expected colwise and '
            f"rowwise ones: {_REMEDY}"
        )
    channels = [features(module.get_submodule(name))[1] for name in inputs]
    channels += [features(module.get_submodule(name))[0] for name in outputs]
    heads = min(channels) // width
    if not heads or any(n % heads for n in channels):
        raise ConfigError(
            f'layers="auto": {kind} has layers of {channels} channels for heads of {width}: {_REMEDY}'
        )
    return OwnHeads(heads, dict.fromkeys(inputs, 1), tuple(outputs), tuple(shared))


# ---- by structure ------------------------------------------------------------------------------------------


def _of_structure(model: nn.Module) -> dict[str, ShardFn]:
    """Return the functions for attention and for pairs of linear layers by their features."""
    cuts: dict[str, ShardFn] = {}
    for path, module in model.named_modules():
        linear = [name for name, child in module.named_children() if is_linear(child)]
        if len(linear) < 2:
            continue
        attention = _attention_of_structure(module, linear)
        if attention is not None:
            cuts[path] = attention
        elif len(linear) == 2:
            (width, hidden), other = (features(module.get_submodule(name)) for name in linear)
            if other == (hidden, width):
                first, second = (joined(path, name) for name in linear)
                cuts |= {first: _CutLinear("first"), second: _CutLinear("second")}
    return cuts


def _attention_of_structure(module: nn.Module, linear: list[str]) -> OwnHeads | None:
    """Return the cut of attention with a layer each for queries, keys and values, or a transposed joint one."""
    name = next((x for x in _HEADS if isinstance(getattr(module, x, None), int)), None)
    *inputs, last = linear
    channels = features(module.get_submodule(last))[0]
    if name is None or not inputs or channels % (heads := getattr(module, name)):
        return None
    joint = is_transposed(module.get_submodule(inputs[0])) and len(inputs) == 1
    repeats = 3 if joint else 1
    if any(features(module.get_submodule(x))[1] != repeats * channels for x in inputs):
        return None
    sizes = [
        key
        for key, x in vars(module).items()
        if type(x) is int and x == channels and key.endswith(("dim", "size")) and not key.startswith("head")
    ]
    return OwnHeads(heads, dict.fromkeys(inputs, repeats), (last,), sizes=(name, *sizes))


# ---- tied embeddings ---------------------------------------------------------------------------------------


def _cut_tied(model: nn.Module, tied: Sequence[Sequence[str]]) -> dict[str, ShardFn]:
    """Return the functions for an embedding and the output layer that is tied to it, which are cut alike."""
    cuts: dict[str, ShardFn] = {}
    for names in tied:
        layers = {path: model.get_submodule(path) for path in (name.rpartition(".")[0] for name in names)}
        if {type(layer) for layer in layers.values()} == {nn.Embedding, nn.Linear}:
            for path, layer in layers.items():
                cuts[path] = _cut_table if type(layer) is nn.Embedding else _cut_scores
    return cuts
