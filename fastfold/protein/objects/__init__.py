"""Structures as objects of Biotite, Biopython and MDAnalysis, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.protein.objects.write import to_biopython, to_biotite, to_mdanalysis

__all__ = ["to_biopython", "to_biotite", "to_mdanalysis"]

__getattr__, __dir__ = lazy_names(__name__)
