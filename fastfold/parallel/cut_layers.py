"""Replacement of a model's layers by this rank's parts of them, for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel.checks.plain_layers import check_restored, check_unchanged, signature
from fastfold.parallel.data_parallel.full_state import ShardFn
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.module_structure import tie, without_data


def cut_layers(
    model: nn.Module, cuts: Mapping[str, ShardFn], mesh: ParallelMesh, tied: Sequence[Sequence[str]]
) -> dict[str, nn.Module]:
    """Replace layers by this rank's parts of them, in place; return the plain ones by path, without data.

    ``cuts`` has the function of each layer by path. ``tied`` has the names of each parameter that has several; it
    stays one.

    Raises:
        ConfigError: A layer cannot be cut with the same result; the message names it.
    """
    plain = {path: without_data(model.get_submodule(path)) for path in cuts}
    for path, shard_fn in cuts.items():
        owner, layer = model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)
        try:
            check_unchanged(layer, owner)
            before = signature(layer)
            cut = shard_fn(layer, mesh)
            check_restored(before, cut)
        except ConfigError as error:
            raise ConfigError(f"layers= cuts {path}: {error}") from error
        model.set_submodule(path, cut)
    tie(model, tied)
    return plain
