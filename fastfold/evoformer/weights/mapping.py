"""How the parameters of weight files lie in ours: mappings, and the copying along them in both directions.

A :class:`ParamMapping` says where one official parameter, or a part of it, lies in a parameter of ours. The names
themselves stand in :mod:`fastfold.evoformer.weights.alphafold_names` and
:mod:`fastfold.evoformer.weights.openfold_names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fastfold.errors import WeightsError

# Arrays are handled by NumPy throughout: on a busy machine PyTorch's threads take milliseconds to begin, which for
# thousands of small tensors added up to twenty seconds instead of one.

_NAMED_PROBLEMS = 5


@dataclass(frozen=True)
class ParamMapping:
    """One official parameter, or a part of its last axis, and the place in ours that holds it.

    Attributes:
        name: Our parameter.
        key: Official key ``scope//name``, without the prefix that all keys have.
        shape: Official shape of one block.
        view: Shape in which the official axes are told apart; ``shape`` when empty.
        inputs: How many leading axes of ``view`` are input channels (0 for biases and vectors).
        order: Order in which our layout has the remaining axes; as they are when empty.
        part: Slice of the last axis of ``view``.
        rows: Slice of our parameter's first axis.
        block: Index along the official leading axis, for blocks of a stack.
        blocks: Size of that axis.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    view: tuple[int, ...] = ()
    inputs: int = 0
    order: tuple[int, ...] = ()
    part: slice = field(default_factory=lambda: slice(None))
    rows: slice = field(default_factory=lambda: slice(None))
    block: int | None = None
    blocks: int = 0

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Official shape, stack axis included."""
        return self.shape if self.block is None else (self.blocks, *self.shape)

    @property
    def flat_shape(self) -> tuple[int, ...]:
        """Official shape with all input axes joined to one and all output axes too, stack axis included."""
        stack = () if self.block is None else (self.blocks,)
        if self.inputs == 0:
            return (*stack, prod(self.shape))
        # The axes of shape and view hold the same channels; inputs are never split in shape.
        channels = prod((self.view or self.shape)[: self.inputs])
        return (*stack, channels, prod(self.shape) // channels)

    def read(self, array: np.ndarray) -> np.ndarray:
        """Our part, matrices as ``[out, in]``, of the official ``array``."""
        x = self._arranged(array)
        if self.inputs == 0:
            return x.reshape(-1)
        return x.reshape(prod(x.shape[: self.inputs]), -1).T

    def write(self, ours: np.ndarray, array: np.ndarray) -> None:
        """Put our part into the official ``array`` (C order): the inverse of :meth:`read`."""
        target = self._arranged(array)
        target[...] = (ours.T if self.inputs else ours).reshape(target.shape)

    def _arranged(self, array: np.ndarray) -> np.ndarray:
        """View of the official ``array`` that has only our part, its axes in our order."""
        x = array if self.block is None else array[self.block]
        x = x.reshape(self.view or self.shape)[..., self.part]
        axes = tuple(self.inputs + i for i in self.order)
        return x.transpose(*range(self.inputs), *axes) if axes else x


class Source(Protocol):
    """A weights file seen through official keys, whatever its own names are.

    Attributes:
        origin: The file, for errors.
        flat: Whether head axes are joined with their channels, as in :attr:`ParamMapping.flat_shape`.
        dtype: Element types of its parameters, for people.
    """

    origin: str
    flat: bool
    dtype: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each parameter by official key, blocks of a stack along the first axis."""

    def label(self, key: str) -> str:
        """The file's own name of a parameter."""

    def show_shape(self, key: str, shape: tuple[int, ...]) -> str:
        """A shape as the file has its axes."""

    def read(self, key: str) -> np.ndarray:
        """The float32 array of :attr:`shapes`. A parameter is read once; its memory may be let go then."""


def check_parameters(mappings: Iterable[ParamMapping], source: Source) -> None:
    """See that a file has the network's parameters, all of them and no others, before anything is read.

    Raises:
        WeightsError: A parameter is missing, has another shape, or has no place in the network; the first ones
            are named as the file names them, the rest are counted.
    """
    wanted = {mapping.key: mapping.flat_shape if source.flat else mapping.full_shape for mapping in mappings}
    missing = [f"parameter {source.label(key)} is missing" for key in wanted if key not in source.shapes]
    extra = [
        f"parameter {source.label(key)} has no place in this network"
        for key in source.shapes
        if key not in wanted
    ]
    misshapen = [
        f"parameter {source.label(key)} has shape {source.show_shape(key, source.shapes[key])}, "
        f"the network needs {source.show_shape(key, shape)}"
        for key, shape in wanted.items()
        if source.shapes.get(key, shape) != shape
    ]
    refuse_problems(source.origin, [*missing, *extra, *misshapen])


def refuse_problems(origin: str, problems: list[str]) -> None:
    """Raise a :class:`WeightsError` that names the first of ``problems`` and counts the rest; none is no error."""
    if not problems:
        return
    shown = "; ".join(problems[:_NAMED_PROBLEMS])
    if len(problems) > _NAMED_PROBLEMS:
        shown += f"; and {len(problems) - _NAMED_PROBLEMS} more"
    raise WeightsError(
        f"{origin}: {shown}. The file is incomplete or was made for another network: "
        "get it again, or give the configuration it belongs to"
    )


def refuse_not_finite(origin: str, name: str, values: np.ndarray) -> None:
    """Raise a :class:`WeightsError` if a parameter holds NaN or infinite values."""
    if not np.isfinite(values).all():
        raise WeightsError(
            f"{origin}: parameter {name} holds NaN or infinite values; the file is damaged or its training "
            "diverged: get another copy"
        )


def read_parameters(model: nn.Module, mappings: Iterable[ParamMapping], source: Source) -> dict[str, Tensor]:
    """State dict of a network from a file that :func:`check_parameters` has passed.

    Args:
        model: The network; its parameters give names and shapes alone and may be on the meta device.
        mappings: All mappings of that network.
        source: The file.

    Returns:
        Float32 tensors by our names. One parameter of the file is in memory in addition to them at a time.

    Raises:
        WeightsError: A parameter holds NaN or infinite values, or its data are damaged.
    """
    by_key: dict[str, list[ParamMapping]] = {}
    for mapping in mappings:
        by_key.setdefault(mapping.key, []).append(mapping)
    state = {
        name: torch.empty(value.shape, dtype=torch.float32) for name, value in model.state_dict().items()
    }
    for key, parts in by_key.items():
        array = source.read(key)
        refuse_not_finite(source.origin, source.label(key), array)
        array = array.reshape(parts[0].full_shape)
        for mapping in parts:
            place = state[mapping.name][mapping.rows].numpy()
            place[...] = mapping.read(array).reshape(place.shape)
    return state


def write_parameters(model: nn.Module, mappings: Iterable[ParamMapping]) -> Iterator[tuple[str, np.ndarray]]:
    """Official float32 arrays of a network, one after the other.

    Yields:
        Official key (without the common prefix) and array.
    """
    by_key: dict[str, list[ParamMapping]] = {}
    for mapping in mappings:
        by_key.setdefault(mapping.key, []).append(mapping)
    state = model.state_dict()
    for key, parts in by_key.items():
        array = np.empty(parts[0].full_shape, np.float32)
        for mapping in parts:
            mapping.write(state[mapping.name][mapping.rows].detach().cpu().float().numpy(), array)
        yield key, array
