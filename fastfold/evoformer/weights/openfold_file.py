"""OpenFold's state dicts: those of all releases are read under official keys, and those of version 2 are written.

OpenFold's matrices are the transposed official ones, with head axes joined with their channels and a tensor per block.
Names that changed between releases (published monomer weights, training checkpoints, the multimer refactoring) are
first converted to those of version 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

from fastfold.errors import WeightsError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.mapping import WeightSource, write_parameters
from fastfold.evoformer.weights.names import (
    ONE_CHANNEL,
    alphafold_mappings,
    known_names,
    network_names,
    official_axes,
    split_block,
)
from fastfold.evoformer.weights.untrusted import types_of

# Constant tables that older releases store next to the parameters.
_CONSTANTS = re.compile(r"structure_module\.(?:default_frames|group_idx|atom_mask|lit_positions)")
# For incoming edges OpenFold contracts a with b, the official program b with a.
_EXCHANGED_HALVES = re.compile(r"/triangle_multiplication_incoming/(?:projection|gate)//")

# Spellings of older releases and of version 2. Wrappers add prefixes, and releases moved modules.
_PAIR_STEP = r"(?=tri_|pair_transition\.)"
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"^(?:module\.)?(?:model\.)?", ""),
        (r"^(?=template_(?!embedder\.)|linear_t\.)", "template_embedder."),
        (r"\.template_angle_embedder\.", ".template_single_embedder."),
        (r"^extra_msa_stack\.stack\.", "extra_msa_stack."),
        (rf"^((?:evoformer|extra_msa_stack)\.blocks\.[0-9]+)\.(?:core\.)?{_PAIR_STEP}", r"\1.pair_stack."),
        (r"(\.blocks\.[0-9]+)\.core\.", r"\1."),
        (r"^(evoformer\..*\.msa_att_col)\.(?!_msa_att\.)", r"\1._msa_att."),
        (r"_points\.(?!linear\.)", "_points.linear."),
    )
)


def spell(name: str) -> tuple[str, int | None]:
    """Return version 2's spelling of any release's name, with ``*`` for a block's number, and that number."""
    for pattern, spelling in _SPELLINGS:
        name = pattern.sub(spelling, name)
    return split_block(name)


def is_openfold(names: Iterable[str]) -> bool:
    """Return True if parameter names are OpenFold's."""
    return any(name.endswith("input_embedder.linear_tf_m.weight") for name in names)


class OpenFoldParameters(WeightSource):
    """OpenFold's state dict under official keys.

    Args:
        tensors: State dict of any release. Reading a parameter removes its tensors from the dict.
        origin: Name of the file in errors.

    Raises:
        WeightsError: A name is not OpenFold's or has two spellings, or the blocks of a stack differ.
    """

    flat = True

    def __init__(self, tensors: dict[str, Tensor], origin: str) -> None:
        self.origin = origin
        self._tensors = tensors
        spelled = {name: spell(name) for name in tensors}
        spellings = {spelling for spelling, _ in spelled.values()}
        templates = "template_embedder.template_pair_stack.blocks.*"
        known = known_names(
            multimer="structure_module.ipa.linear_k.weight" in spellings,
            fused="evoformer.blocks.*.pair_stack.tri_mul_out.linear_ab_p.weight" in spellings,
            fused_templates=f"{templates}.tri_mul_out.linear_ab_p.weight" in spellings,
        )
        self._official = {names.openfold: names.official for names in known}
        self._names: dict[str, dict[int | None, str]] = {}
        for name, (spelling, block) in spelled.items():
            if _CONSTANTS.fullmatch(spelling):
                continue
            if not tensors[name].is_floating_point():
                raise WeightsError(
                    f"{origin}: parameter {name}: expected floating point numbers, "
                    f"found {tensors[name].dtype}"
                )
            if spelling not in self._official:
                raise WeightsError(
                    f"{origin}: parameter {name} is not in any AlphaFold 2 release of OpenFold; "
                    "other networks cannot be read"
                )
            blocks = self._names.setdefault(self._official[spelling], {})
            if block in blocks:
                raise WeightsError(f"{origin}: {blocks[block]} and {name} are the same parameter; remove one")
            blocks[block] = name
        dtypes = (tensors[name].dtype for names in self._names.values() for name in names.values())
        super().__init__(origin, {key: self._shape(key) for key in self._names}, types_of(dtypes))

    def label(self, key: str) -> str:
        """Return OpenFold's name of a parameter, in the file or else in our table."""
        if key in self._names:
            return next(iter(self._names[key].values()))
        return next((name for name, official in self._official.items() if official == key), key)

    def show_shape(self, key: str, shape: tuple[int, ...]) -> str:
        """Return a shape of :attr:`shapes` in OpenFold's axes."""
        if None in self._names[key]:
            return str(list(shape[::-1]))
        return f"{list(shape[:0:-1])} in {shape[0]} blocks"

    def read(self, key: str) -> np.ndarray:
        """Read a float32 array of the shape in :attr:`shapes`, and release the file's tensors."""
        names = self._names[key]
        if None in names:
            return np.ascontiguousarray(self._take(key, names[None])).reshape(self.shapes[key])
        return np.stack([self._take(key, names[i]) for i in range(len(names))])

    def _take(self, key: str, name: str) -> np.ndarray:
        """Remove one tensor of the file and return it as float32 with official axes."""
        array = self._tensors.pop(name).float().numpy()
        if _EXCHANGED_HALVES.search(key):
            array = np.roll(array, len(array) // 2, axis=0)
        return array.T

    def _shape(self, key: str) -> tuple[int, ...]:
        names = self._names[key]
        own = {tuple(self._tensors[name].shape) for name in names.values()}
        if len(own) > 1:
            raise WeightsError(
                f"{self.origin}: parameter {self.label(key)} has different shapes in different blocks; "
                "the file is damaged, download it again"
            )
        shape = official_axes(key, own.pop())
        if None in names:
            return shape
        absent = next((i for i in range(len(names)) if i not in names), None)
        if absent is not None:
            name = re.sub(r"\.blocks\.\d+\.", f".blocks.{absent}.", self.label(key))
            raise WeightsError(
                f"{self.origin}: parameter {name} is missing, but later blocks have it; "
                "the file is incomplete, download it again"
            )
        return (len(names), *shape)


def openfold_parameters(model: AlphaFold) -> Iterator[tuple[str, np.ndarray]]:
    """Yield OpenFold's name (version 2) and float32 array of a network's parameters, one by one.

    Raises:
        WeightsError: The network has parts that AlphaFold does not have.
    """
    names = {row.official: row.openfold for row in network_names(model)}
    mappings = alphafold_mappings(model)
    layout = {mapping.key: (mapping.flat_shape, mapping.block is not None) for mapping in mappings}
    for key, array in write_parameters(model, mappings):
        shape, is_stacked = layout[key]
        blocks = array.reshape(shape)
        for i, block in enumerate(blocks if is_stacked else [blocks]):
            yield names[key].replace("*", str(i)), _openfold_axes(key, block)


def _openfold_axes(key: str, array: np.ndarray) -> np.ndarray:
    if ONE_CHANNEL.search(key):
        return array[:, None]
    if _EXCHANGED_HALVES.search(key):
        array = np.roll(array, array.shape[-1] // 2, axis=-1)
    return np.ascontiguousarray(array.T)
