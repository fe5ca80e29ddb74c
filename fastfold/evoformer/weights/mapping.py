"""Mappings between the parameters of weights files and ours, and copying in both directions.

A :class:`ParamMapping` maps one official parameter, or a part of it, to a parameter of ours. The names are in
:mod:`fastfold.evoformer.weights.names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from fastfold.errors import WeightsError

# NumPy handles all arrays, because starting PyTorch's threads for thousands of small tensors is slow on a busy
# machine.

_NAMED_PROBLEMS = 5


@dataclass(frozen=True)
class ParamMapping:
    """Mapping of one official parameter, or a part of its last axis, to a parameter of ours."""

    name: str  #: Our parameter
    key: str  #: Official key ``scope//name``, without the common prefix
    shape: tuple[int, ...]  #: Official shape of one block
    view: tuple[int, ...] = ()  #: ``shape`` with joined axes split; ``shape`` if empty
    inputs: int = 0  #: Number of leading axes of ``view`` that are input channels (0 for biases and vectors)
    order: tuple[int, ...] = ()  #: Order of the remaining axes in our layout; unchanged if empty
    part: slice = field(default_factory=lambda: slice(None))  #: Slice of the last axis of ``view``
    rows: slice = field(default_factory=lambda: slice(None))  #: Slice of our parameter's first axis
    block: int | None = None  #: Index along the official leading axis, for blocks of a stack
    blocks: int = 0  #: Size of that axis

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Official shape with the stack axis."""
        return self.shape if self.block is None else (self.blocks, *self.shape)

    @property
    def flat_shape(self) -> tuple[int, ...]:
        """Official shape with the stack axis, one joined input axis and one joined output axis."""
        stack = () if self.block is None else (self.blocks,)
        if self.inputs == 0:
            return (*stack, prod(self.shape))
        # shape and view hold the same channels; shape never splits the inputs.
        channels = prod((self.view or self.shape)[: self.inputs])
        return (*stack, channels, prod(self.shape) // channels)

    def read(self, array: np.ndarray) -> np.ndarray:
        """Return our part of the official ``array``, matrices as ``[out, in]``."""
        x = self._arranged(array)
        if self.inputs == 0:
            return x.reshape(-1)
        return x.reshape(prod(x.shape[: self.inputs]), -1).T

    def write(self, ours: np.ndarray, array: np.ndarray) -> None:
        """Write our part into the official ``array`` (C order); inverse of :meth:`read`."""
        target = self._arranged(array)
        target[...] = (ours.T if self.inputs else ours).reshape(target.shape)

    def _arranged(self, array: np.ndarray) -> np.ndarray:
        """Return a view of our part of the official ``array``, with axes in our order."""
        x = array if self.block is None else array[self.block]
        x = x.reshape(self.view or self.shape)[..., self.part]
        axes = tuple(self.inputs + i for i in self.order)
        return x.transpose(*range(self.inputs), *axes) if axes else x


class WeightSource:
    """Parameters of a weights file under official keys, or our names; subclasses read them and tell the file's names.

    Args:
        origin: Name of the file in errors.
        shapes: Shape of each parameter by key, blocks of a stack along the first axis.
        dtype: Element types of the parameters, as text.
    """

    flat = False  #: True if head axes are joined with their channels, as in :attr:`ParamMapping.flat_shape`

    def __init__(self, origin: str, shapes: Mapping[str, tuple[int, ...]], dtype: str = "") -> None:
        self.origin, self.shapes, self.dtype = origin, shapes, dtype

    def label(self, key: str) -> str:
        """Return the parameter's name in the file."""
        return key

    def show_shape(self, key: str, shape: tuple[int, ...]) -> str:
        """Return a shape in the axes of the file."""
        return str(list(shape))

    def read(self, key: str) -> np.ndarray:
        """Read a float32 array of the shape in :attr:`shapes`; may be called only once for a parameter."""
        raise NotImplementedError


def own_mappings(model: nn.Module) -> list[ParamMapping]:
    """Return mappings of a network's parameters to themselves, for files with our names."""
    return [ParamMapping(name, name, tuple(value.shape)) for name, value in model.state_dict().items()]


def check_parameters(mappings: Iterable[ParamMapping], source: WeightSource) -> None:
    """Check that a file has exactly the network's parameters, before any data are read.

    Raises:
        WeightsError: A parameter is missing, unknown, or has a wrong shape. The message lists the first problems and
            counts the rest.
    """
    wanted = {mapping.key: mapping.flat_shape if source.flat else mapping.full_shape for mapping in mappings}
    missing = [f"parameter {source.label(key)} is missing" for key in wanted if key not in source.shapes]
    extra = [
        f"parameter {source.label(key)} is not in this network" for key in source.shapes if key not in wanted
    ]
    misshapen = [
        f"parameter {source.label(key)}: expected shape {source.show_shape(key, shape)}, "
        f"found {source.show_shape(key, source.shapes[key])}"
        for key, shape in wanted.items()
        if source.shapes.get(key, shape) != shape
    ]
    if problems := [*missing, *extra, *misshapen]:
        shown = "; ".join(problems[:_NAMED_PROBLEMS])
        if len(problems) > _NAMED_PROBLEMS:
            shown += f"; and {len(problems) - _NAMED_PROBLEMS} more"
        raise WeightsError(
            f"{source.origin}: {shown}. The file is incomplete or belongs to another network; "
            "download it again, or pass its configuration"
        )


def refuse_not_finite(origin: str, name: str, values: np.ndarray) -> None:
    """Raise a :class:`WeightsError` if a parameter holds NaN or infinite values."""
    if not np.isfinite(values).all():
        raise WeightsError(
            f"{origin}: parameter {name} holds NaN or infinite values; the file is damaged or its training "
            "diverged; use another copy"
        )


def read_parameters(
    model: nn.Module, mappings: Iterable[ParamMapping], source: WeightSource
) -> dict[str, Tensor]:
    """Read a network's float32 state dict from a file that passed :func:`check_parameters`.

    The memory peak is these tensors plus one parameter of the file.

    Raises:
        WeightsError: A parameter holds NaN or infinite values, or its data are damaged.
    """
    state = {
        name: torch.empty(value.shape, dtype=torch.float32) for name, value in model.state_dict().items()
    }
    for key, parts in _by_key(mappings).items():
        array = source.read(key)
        refuse_not_finite(source.origin, source.label(key), array)
        array = array.reshape(parts[0].full_shape)
        for mapping in parts:
            place = state[mapping.name][mapping.rows].numpy()
            place[...] = mapping.read(array).reshape(place.shape)
    return state


def write_parameters(model: nn.Module, mappings: Iterable[ParamMapping]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield official key, without the common prefix, and float32 array of a network's parameters, one by one."""
    state = model.state_dict()
    for key, parts in _by_key(mappings).items():
        array = np.empty(parts[0].full_shape, np.float32)
        for mapping in parts:
            mapping.write(state[mapping.name][mapping.rows].detach().cpu().float().numpy(), array)
        yield key, array


def _by_key(mappings: Iterable[ParamMapping]) -> dict[str, list[ParamMapping]]:
    by_key: dict[str, list[ParamMapping]] = {}
    for mapping in mappings:
        by_key.setdefault(mapping.key, []).append(mapping)
    return by_key
