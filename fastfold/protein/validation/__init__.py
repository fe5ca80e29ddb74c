"""Checks of a structure alone: is its geometry that of a protein?"""

from fastfold.protein.validation.structure_check import StructureCheck, check_structure

__all__ = ["StructureCheck", "check_structure"]
