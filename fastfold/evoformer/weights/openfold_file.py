"""Reading OpenFold's state dicts of all releases under official keys, with official axes.

OpenFold's matrices are the transposed official ones, with head axes joined with their channels and a tensor per block.
Names that changed between releases (published monomer weights, training checkpoints, the multimer refactoring) are
first converted to one spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from fastfold.errors import WeightsError
from fastfold.evoformer.weights.mapping import Source
from fastfold.evoformer.weights.names import official_keys
from fastfold.evoformer.weights.untrusted import types_of

# Constant tables that older releases store next to the parameters.
_CONSTANTS = re.compile(r"structure_module\.(?:default_frames|group_idx|atom_mask|lit_positions)")
# Layers with one input channel, whose official weight is a vector.
_VECTOR = re.compile(r"/template_pair_embedding_[14567]//weights$")
# For incoming edges OpenFold contracts a with b, the official program b with a.
_EXCHANGED_HALVES = re.compile(r"/triangle_multiplication_incoming/(?:projection|gate)//")

_TORSIONS = "template_single_embedder"
# Spelling in some release, and our common spelling. Wrappers add prefixes, and releases moved modules.
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"^(?:module\.)?(?:model\.)?", ""),
        (r"^template_embedder\.", ""),
        (r"^template_(?:angle|single)_embedder\.linear_1\.", f"{_TORSIONS}.template_single_embedder."),
        (r"^template_(?:angle|single)_embedder\.linear_2\.", f"{_TORSIONS}.template_projector."),
        (r"^extra_msa_stack\.stack\.", "extra_msa_stack."),
        (r"(\.blocks\.[0-9]+)\.(?:core|pair_stack)\.", r"\1."),
        (r"\.msa_att_col\._msa_att\.", ".msa_att_col."),
        (r"_points\.linear\.", "_points."),
    )
)
_BLOCK = re.compile(r"\.blocks\.([0-9]{1,6})\.")


def spell(name: str) -> tuple[str, int | None]:
    """Return the common spelling of any release's name, with ``*`` for a block's number, and that number."""
    for pattern, spelling in _SPELLINGS:
        name = pattern.sub(spelling, name)
    match = _BLOCK.search(name)
    return _BLOCK.sub(".blocks.*.", name), int(match[1]) if match else None


def is_openfold(names: Iterable[str]) -> bool:
    """Return True if parameter names are OpenFold's."""
    return any(name.endswith("input_embedder.linear_tf_m.weight") for name in names)


class OpenFoldParameters(Source):
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
        self._official = official_keys(
            multimer="structure_module.ipa.linear_k.weight" in spellings,
            fused="evoformer.blocks.*.tri_mul_out.linear_ab_p.weight" in spellings,
            fused_templates="template_pair_stack.blocks.*.tri_mul_out.linear_ab_p.weight" in spellings,
        )
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
        shape = own.pop()[::-1]
        shape = shape[1:] if _VECTOR.search(key) and len(shape) == 2 and shape[0] == 1 else shape
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
