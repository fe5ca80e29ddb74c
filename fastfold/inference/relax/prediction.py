"""Relax a prediction, for ``infer`` and for Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.relax.protocol import relax
from fastfold.inference.relax.result import RelaxResult, relaxed_mmcif, relaxed_pdb
from fastfold.protein.protein import Protein

if TYPE_CHECKING:
    from fastfold.inference.output.prediction import Prediction


@dataclass(frozen=True, eq=False)
class RelaxedPrediction:
    """Prediction of the network, with its confidences, and the result of its relaxation."""

    prediction: Prediction
    result: RelaxResult

    @property
    def protein(self) -> Protein:
        """Relaxed structure without hydrogens."""
        return self.result.protein

    def record(self) -> dict[str, Any]:
        """Return energies, movement, violations and seconds for the scores file, in JSON's types."""
        return self.result.to_dict()

    def to_pdb(self) -> str:
        """Format the relaxed structure with hydrogens as a PDB file, with pLDDT in the B-factor column.

        Raises:
            OutputError: The minimiser failed (``result.minimized`` is false).
            PdbLimitError: The structure exceeds the PDB format; use :meth:`to_mmcif`.
        """
        return relaxed_pdb(self.result, title=self.prediction.title)

    def to_mmcif(self) -> str:
        """Format the relaxed structure with hydrogens as ModelCIF, with the confidences of the prediction.

        Raises:
            OutputError: The minimiser failed (``result.minimized`` is false).
        """
        return relaxed_mmcif(self.result, **self.prediction.modelcif_arguments())


def relax_prediction(prediction: Prediction, config: RelaxConfig | None = None) -> RelaxedPrediction:
    """Relax the structure of a prediction; a failed relaxation does not raise.

    Settings and errors are those of :func:`~fastfold.inference.relax.protocol.relax`.
    """
    return RelaxedPrediction(prediction, relax(prediction.protein, config, continuous=True))
