"""Given chains and their residues: text forms such as ``A10-25,A40``, and the templates of a binder's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from fastfold.data.targets import Target
from fastfold.data.templates.whole.given import empty_template, whole_template, with_virtual_cb
from fastfold.errors import ConfigError, InputError
from fastfold.products.design.config import Flexible
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import ObservedChain
from fastfold.protein.structure import ChainStructure

_KEPT = [rc.atom_order[name] for name in ("N", "CA", "C", "CB", "O")]
_GAP = 21


@dataclass(frozen=True)
class TargetStructure:
    """Structure file of given chains."""

    path: Path  #: PDB or mmCIF file
    chains: tuple[str, ...] = ()  #: Chain names; empty for all
    hotspots: str = ""  #: Residues, such as ``A10-25,A40``; empty for any

    @classmethod
    def parse(cls, text: str) -> TargetStructure:
        """Read ``FILE:CHAINS:RESIDUES``, such as ``t.pdb:A,B:A54``, or its first parts, or raise ConfigError."""
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
    chains: Sequence[ObservedChain | None], name: str, flexible: Sequence[Flexible]
) -> tuple[Mapping[str, np.ndarray] | None, ...] | None:
    """Return raw template features of each chain, without the parts that are flexible; None if all are free.

    ``chains`` has the structure of each chain, None for a chain without a template, ``name`` is that of their file, and
    ``flexible`` has the parts of each chain's template that are left out.
    """

    def template(chain: ObservedChain | None, parts: Flexible) -> Mapping[str, np.ndarray] | None:
        if chain is None or parts == "free":
            return None
        # As in ColabDesign, glycines have a CB, so that a template without residue types does not reveal them.
        features = whole_template(with_virtual_cb(chain), f"{name}_{chain.chain_id}".encode())
        return _flexible(features, parts)

    features = tuple(template(chain, parts) for chain, parts in zip(chains, flexible, strict=True))
    return features if any(one is not None for one in features) else None


def with_frames(
    features: Sequence[Mapping[str, np.ndarray]], frames: Sequence[int], name: bytes
) -> tuple[Mapping[str, np.ndarray], ...]:
    """Return templates of the chains of a joined target, one for each frame, without the chains of other frames.

    Args:
        features: Raw template features of each chain, with one template.
        frames: Number of the frame of each chain's atoms.
        name: Name of empty templates.
    """
    numbers = sorted(set(frames))

    def stacked(one: Mapping[str, np.ndarray], frame: int) -> Mapping[str, np.ndarray]:
        empty = empty_template(one["template_aatype"].shape[1], name)
        parts = [one if number == frame else empty for number in numbers]
        whole = {key: np.concatenate([part[key] for part in parts]) for key in empty}
        return {**whole, "template_frame": np.arange(1, len(numbers) + 1, dtype=np.int32)}

    return tuple(stacked(one, frame) for one, frame in zip(features, frames, strict=True))


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


def residue_text(target: Target, residues: Sequence[int]) -> str:
    """Return residues of a target by their places in the joined chains, in the form of :func:`residue_places`.

    Runs of neighbours are ranges: ``D330-338,D346,E20A``.
    """
    names = target.names
    chain = np.repeat(np.arange(len(target.chains)), [len(one.sequence) for one in target.chains])
    index = np.concatenate([one.residue_index for one in target.chains])
    parts: list[list[int]] = []
    for i in sorted(residues):
        if parts and i == parts[-1][-1] + 1 and chain[i] == chain[i - 1] and index[i] == index[i - 1] + 1:
            parts[-1].append(i)
        else:
            parts.append([i])
    ends = ("-".join(dict.fromkeys(names.numbers[i] for i in (part[0], part[-1]))) for part in parts)
    return ",".join(f"{names.chain_ids[chain[part[0]]]}{end}" for part, end in zip(parts, ends, strict=True))


def residue_places(text: str, chains: Sequence[ChainStructure], path: Path) -> np.ndarray:
    """Return the places ``[K]`` int64 of residues in the joined chains, increasing, without repeats.

    ``text`` has residues, ranges and whole chains by the names of the file, such as ``A10-25,A40,B``. The chain's
    name may be left out if there is one chain. An InputError names a part that cannot be read, or a missing chain or
    residue.
    """
    chosen: set[int] = set()
    starts = np.cumsum([0, *map(len, chains)])
    for part in filter(None, (one.strip() for one in text.split(","))):
        if part in (names := [chain.chain_id for chain in chains]):
            number = names.index(part)
            chosen.update(range(starts[number], starts[number + 1]))
            continue
        if (match := _match(part, chains)) is None:
            raise InputError(
                f"expected residues such as {chains[0].chain_id}10-25, found {part!r}; the file's chains are "
                f"{', '.join(chain.chain_id for chain in chains)}",
                path=path,
            )
        number, first, last = match
        start = int(starts[number])
        places = [_place(chains[number], one, path) for one in (first, last)]
        if places[1] < places[0]:
            raise InputError(f"{part}: the last residue comes before the first", path=path)
        chosen.update(range(start + places[0], start + places[1] + 1))
    return np.array(sorted(chosen), np.int64)


def _match(part: str, chains: Sequence[ChainStructure]) -> tuple[int, str, str] | None:
    """Return chain, first and last number of ``A10-25``; the longest chain name that fits."""
    for number in sorted(range(len(chains)), key=lambda i: -len(chains[i].chain_id)):
        name = chains[number].chain_id
        rest = part[len(name) :] if part.startswith(name) else part if len(chains) == 1 else ""
        if match := re.fullmatch(r":?(-?\d+[A-Za-z]?)(?:-(-?\d+[A-Za-z]?))?", rest):
            return number, match[1], match[2] or match[1]
    return None


def _place(chain: ChainStructure, number: str, path: Path) -> int:
    try:
        return chain.author_numbers.index(number)
    except ValueError:
        known = [one for one in chain.author_numbers if one]
        raise InputError(
            f"chain {chain.chain_id} has no residue {number} with coordinates; its numbers go from {known[0]} to "
            f"{known[-1]}",
            path=path,
        ) from None
