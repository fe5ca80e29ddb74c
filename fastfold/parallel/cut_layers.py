"""Replacement of a model's layers by this rank's parts of them, for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel.checks.plain_layers import check_restored, check_unchanged, signature
from fastfold.parallel.data_parallel.full_state import ShardFn
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.module_structure import is_inside, tie, without_data


def cut_layers(
    model: nn.Module, cuts: Mapping[str, ShardFn], mesh: ParallelMesh, tied: Sequence[Sequence[str]]
) -> dict[str, nn.Module]:
    """Replace layers by this rank's parts of them, in place; return the plain ones by path, without data.

    ``cuts`` has the function of each layer by path. ``tied`` has the names of each parameter that has several; it
    stays one.

    Raises:
        ConfigError: A layer cannot be cut with the same result, or layers with one parameter are cut differently; the
            message names them.
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
    shapes = {name: list(x.shape) for name, x in model.named_parameters(remove_duplicate=False)}
    for names in tied:
        of_rank = {n: shapes[n] for n in names if n in shapes and any(is_inside(n, path) for path in cuts)}
        if len({tuple(shape) for shape in of_rank.values()}) > 1:
            raise ConfigError(
                f"{' and '.join(of_rank)} are one parameter, but layers= cuts them differently (shapes "
                f"{' and '.join(map(str, of_rank.values()))} on a rank); cut them alike, or leave these layers out"
            )
    tie(model, tied)
    return plain
