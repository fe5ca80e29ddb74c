"""Predictions as objects of Biopython and Biotite."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from fastfold.utils.packages import require_package

if TYPE_CHECKING:
    from fastfold.inference.output.prediction import Prediction


def to_biopython(prediction: Prediction) -> Any:
    """Return a ``Bio.PDB`` structure with pLDDT as B-factors.

    Raises:
        OutputError: There are no atoms, or a value is not finite.
    """
    from Bio.PDB.MMCIFParser import MMCIFParser

    parser = MMCIFParser(QUIET=True)
    return parser.get_structure(prediction.name, io.StringIO(prediction.to_mmcif()))


def to_biotite(prediction: Prediction) -> Any:
    """Return a Biotite ``AtomArray`` with pLDDT as ``b_factor``.

    Raises:
        ConfigError: Biotite is not installed.
        OutputError: There are no atoms, or a value is not finite.
    """
    require_package("biotite", "Prediction.to_biotite")
    from biotite.structure.io import pdbx

    file = pdbx.CIFFile.read(io.StringIO(prediction.to_mmcif()))
    return pdbx.get_structure(file, model=1, extra_fields=["b_factor"])
