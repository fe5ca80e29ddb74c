"""Checks of a structure alone: is its geometry that of a protein?"""

from fastfold.protein.validation.structure_check import LISTED_GEOMETRY, StructureCheck, check_structure

__all__ = ["LISTED_GEOMETRY", "StructureCheck", "check_structure"]
