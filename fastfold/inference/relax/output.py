"""Format a relaxed structure with hydrogens as PDB and ModelCIF."""

from __future__ import annotations

from typing import Any

from fastfold._version import __version__
from fastfold.errors import OutputError
from fastfold.inference.relax.result import RelaxResult
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.labels import AuthorNames


def relaxed_pdb(result: RelaxResult, *, title: str, names: AuthorNames | None = None) -> str:
    """Format the structure as a PDB file, whose title tells if it is not relaxed.

    Raises:
        OutputError: The minimiser failed, so the structure is missing.
        PdbLimitError: The structure exceeds the PDB format.
    """
    return to_pdb(result.protein, title=_title(result, title), hydrogens=result.hydrogens, names=names)


def relaxed_mmcif(
    result: RelaxResult, *, title: str, entry_id: str, names: AuthorNames | None = None, **prediction: Any
) -> str:
    """Format the structure as ModelCIF, with relaxation as a step of its protocol.

    Further arguments, for a predicted structure, are ``model_name``, ``plddt``, ``ptm``, ``iptm`` and ``details`` of
    :func:`~fastfold.protein.io.modelcif_writer.to_modelcif`.

    Raises:
        OutputError: The minimiser failed, so the structure is missing.
    """
    title = _title(result, title)
    import openmm

    how = "restrained minimisation" if result.relaxed else "restrained minimisation without success"
    options: dict[str, Any] = {"model_name": "relaxed", "plddt": None} | prediction
    return to_modelcif(
        result.protein,
        entry_id=entry_id,
        title=title,
        software_version=__version__,
        refinement=f"Amber99sb, {how}, OpenMM {openmm.__version__} on {result.platform}, {result.rounds} rounds",
        hydrogens=result.hydrogens,
        names=names,
        **options,
    )


def _title(result: RelaxResult, title: str) -> str:
    if not result.minimized:
        raise OutputError(f"the relaxation gave no structure to write: {result.reason}")
    return f"{title}, relaxed" if result.relaxed else f"{title}, minimised but not relaxed: {result.reason}"
