"""Side chains of a structure: rotamers by backbone, their placement, disulfide bonds, and pierced rings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.protein.side_chains.disulfides import Disulfide, find_disulfides
    from fastfold.protein.side_chains.placement import PlacedSideChains, place_side_chains
    from fastfold.protein.side_chains.rings import PiercedRing, pierced_rings
    from fastfold.protein.side_chains.rotamers import rotamers

__all__ = [
    "Disulfide",
    "PiercedRing",
    "PlacedSideChains",
    "find_disulfides",
    "pierced_rings",
    "place_side_chains",
    "rotamers",
]

__getattr__, __dir__ = lazy_names(__name__)
