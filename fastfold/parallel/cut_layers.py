"""Replacement of a model's layers by this rank's parts of them, for tensor parallelism."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from fastfold.errors import ConfigError, suggest
from fastfold.parallel.comparison import without_data
from fastfold.parallel.data_parallel.full_state import ShardFn
from fastfold.parallel.families.tensor_layers import find_layers
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.paths import is_inside, replace_at, tied_names
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.tensor_parallel.plain_layers import check_restored, check_unchanged, signature

Layers = Mapping[str, ShardFn] | Literal["auto"] | None
"""Argument ``layers`` of :func:`fastfold.parallel.parallelize`."""


def find_cuts(model: nn.Module, plan: ParallelPlan, layers: Layers) -> dict[str, ShardFn]:
    """Return the functions of replaced layers, by path; the outermost matching module wins."""
    if plan.tp == 1:
        return {}
    if not layers:
        raise ConfigError(
            f"tp={plan.tp} needs to know which layers of {type(model).__name__} are cut: give "
            'layers={pattern: function}, or layers="auto" for a model of transformers'
        )
    if isinstance(layers, str):
        layers = find_layers(model, plan)
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


def cut_layers(model: nn.Module, cuts: Mapping[str, ShardFn], mesh: ParallelMesh) -> dict[str, nn.Module]:
    """Replace layers, in place; return the plain ones without data, by their paths.

    Parameters that were tied stay tied.

    Raises:
        ConfigError: A layer cannot be cut with the same result; the message names it.
    """
    tied, plain = tied_names(model), dict[str, nn.Module]()
    for path, shard_fn in cuts.items():
        plain[path] = without_data(model.get_submodule(path))
        _replace(model, path, shard_fn, mesh)
    _retie(model, tied)
    return plain


def _replace(model: nn.Module, path: str, shard_fn: ShardFn, mesh: ParallelMesh) -> None:
    """Replace a layer by this rank's part of it; shared parameters stay shared."""
    owner, layer = model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)
    try:
        check_unchanged(layer, owner)
        before = signature(layer)
        cut = shard_fn(layer, mesh)
        check_restored(before, cut)
    except ConfigError as error:
        raise ConfigError(f"layers= cuts {path}: {error}") from error
    replace_at(model, path, cut)


def _retie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Tie parameters again that were tied before layers were replaced."""
    for names in tied:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        present = [name for name in names if name in parameters]
        for name in present[1:]:
            replace_at(model, name, parameters[present[0]])
