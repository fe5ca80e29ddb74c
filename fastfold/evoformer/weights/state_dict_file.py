"""State dicts under our names without a configuration, which is inferred from their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.evoformer.config import MINI, model_config
from fastfold.evoformer.weights.containers import OWN_LAYER
from fastfold.evoformer.weights.infer_config import Shape, infer_config
from fastfold.evoformer.weights.mapping import WeightSource
from fastfold.evoformer.weights.names import Names, known_names, official_axes, split_block
from fastfold.evoformer.weights.untrusted import types_of


class OwnParameters(WeightSource):
    """State dict under our names.

    Args:
        tensors: Floating point tensors by name. Reading a parameter removes its tensor from the dict.
        origin: Name of the file in errors.
    """

    def __init__(self, tensors: dict[str, Tensor], origin: str) -> None:
        self._tensors = tensors
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        super().__init__(origin, shapes, types_of(tensor.dtype for tensor in tensors.values()))

    def read(self, key: str) -> np.ndarray:
        """Read a parameter as a float32 array."""
        return self._tensors.pop(key).float().numpy()


def is_own(names: Iterable[str]) -> bool:
    """Return True if parameter names are ours."""
    return OWN_LAYER in names


def infer_own_config(shapes: Mapping[str, Shape], *, name_hint: str | None = None) -> ConfigDict:
    """Infer a network's configuration from its parameters' shapes by our names; see :func:`infer_config`.

    A network with parameters that AlphaFold lacks is taken for one of the kind of ``mini``.
    """
    # Only monomer networks have a bias here.
    is_multimer = "structure_module.attention.query.bias" not in shapes
    rows = known_names(multimer=is_multimer, fused=is_multimer, fused_templates=is_multimer)
    known = {row.ours for row in rows}
    is_known = all(name in known or split_block(name)[0] in known for name in shapes)
    base = None if is_known else model_config(MINI)
    return infer_config(_official_shapes(shapes, rows), name_hint=name_hint, base=base)


def _official_shapes(shapes: Mapping[str, Shape], rows: Iterable[Names]) -> dict[str, Shape]:
    """Return flat official shapes by key. Blocks of a stack are assumed to be alike."""
    keys: dict[str, list[str]] = {}
    parts: dict[str, list[str]] = {}
    for row in rows:
        keys.setdefault(row.ours, []).append(row.official)
        parts.setdefault(row.official, []).append(row.ours)
    blocks: dict[str, list[Shape]] = {}
    for name, shape in shapes.items():
        blocks.setdefault(name if name in keys else split_block(name)[0], []).append(shape)
    official: dict[str, Shape] = {}
    for key, names in parts.items():
        if any(name not in blocks for name in names):
            continue
        # Several of ours are parts of one official parameter (keys and values), or one of ours has several (left and
        # right projections).
        rows_of_ours = sum(blocks[name][0][0] if blocks[name][0] else 0 for name in names) // len(
            keys[names[0]]
        )
        shape = official_axes(key, (rows_of_ours, *blocks[names[0]][0][1:]))
        official[key] = (len(blocks[names[0]]), *shape) if "*" in names[0] else shape
    return official
