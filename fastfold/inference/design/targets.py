"""Given chains of a binder: their text form, and their templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fastfold.data.targets import Target
from fastfold.errors import ConfigError
from fastfold.inference.target_templates import read_templates
from fastfold.protein import residue_constants as rc

Flexible = Literal["none", "sidechains", "backbone", "free"]
"""Parts of the templates of given chains that are left out.

``sidechains``: atoms past CB (ColabDesign's ``rm_target_sc``); ``backbone``: residue types as well (``rm_target_seq``,
its ``target_flexible``); ``free``: the whole template (``rm_target``).
"""

_KEPT = [rc.atom_order[name] for name in ("N", "CA", "C", "CB", "O")]
_GAP = 21


@dataclass(frozen=True)
class TargetStructure:
    """Structure file of given chains.

    Attributes:
        path: PDB or mmCIF file.
        chains: Chain names; empty for all.
        hotspots: Residues, such as ``A10-25,A40``; empty for any.
    """

    path: Path
    chains: tuple[str, ...] = ()
    hotspots: str = ""

    @classmethod
    def parse(cls, text: str) -> TargetStructure:
        """Read ``FILE``, ``FILE:CHAINS`` or ``FILE:CHAINS:RESIDUES``, such as ``t.pdb:A,B:A54``.

        Raises:
            ConfigError: The text has more parts.
        """
        parts = [text] if Path(text).exists() else text.split(":")
        if len(parts) > 3 or not parts[0]:
            raise ConfigError(f"expected FILE:CHAINS:RESIDUES such as t.pdb:A,B:A54, found {text!r}")
        path, chains, hotspots = (*parts, "", "")[:3]
        return cls(Path(path), tuple(name for name in chains.split(",") if name), hotspots)


def check_flexible(flexible: str) -> None:
    """Raise ConfigError if a name of :data:`Flexible` is unknown."""
    if flexible not in get_args(Flexible):
        raise ConfigError(f"flexible: expected {', '.join(get_args(Flexible))}, found {flexible!r}")


def template_features(
    target: Target, files: Sequence[Path | None], flexible: Flexible
) -> tuple[Mapping[str, np.ndarray] | None, ...] | None:
    """Return raw template features of each chain, without the parts that are flexible; None if all are free.

    ``files`` has the structure file of each chain, None for a chain without a template.

    Raises:
        InputError: A file cannot be read.
    """
    if flexible == "free":
        return None
    alignments: list[Any] = [([], []) for _ in target.chains]
    read = read_templates(target, alignments, [None if path is None else [path] for path in files])
    if read is None:
        return None
    return tuple(None if one is None else _flexible(one, flexible) for one in read.features)


def _flexible(features: Mapping[str, np.ndarray], flexible: Flexible) -> Mapping[str, np.ndarray]:
    if flexible == "none":
        return features
    kept = np.isin(np.arange(rc.atom_type_num), _KEPT)
    masks = np.asarray(features["template_all_atom_masks"])
    changed = {"template_all_atom_masks": (masks * kept).astype(masks.dtype)}
    if flexible == "backbone":
        types = np.zeros_like(np.asarray(features["template_aatype"]))
        types[..., _GAP] = 1
        changed["template_aatype"] = types
    return {**features, **changed}
