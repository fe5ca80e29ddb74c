"""Checks of a structure alone: is its geometry that of a protein?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.protein.validation.structure_check import StructureCheck, check_structure

__all__ = ["LISTED_GEOMETRY", "StructureCheck", "check_structure"]

LISTED_GEOMETRY = ("ramachandran_favoured", "ramachandran_outliers", "twisted_peptides", "pierced_rings")
"""Figures of :attr:`StructureCheck.figures` in tables of structures."""

__getattr__, __dir__ = lazy_names(__name__)
