"""Residues, rigid frames, torsions and structures; ``io`` has file formats, ``metrics`` comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.protein.io.read import read_structure
    from fastfold.protein.metrics.lddt import lddt
    from fastfold.protein.metrics.tm_score import gdt, tm_score
    from fastfold.protein.objects.write import to_biopython, to_biotite, to_mdanalysis
    from fastfold.protein.protein import Protein

__all__ = [
    "Protein",
    "gdt",
    "lddt",
    "read_structure",
    "tm_score",
    "to_biopython",
    "to_biotite",
    "to_mdanalysis",
]

__getattr__, __dir__ = lazy_names(__name__)
