"""Confidence of a prediction, computed from the logits of the heads in blocks of rows."""

from fastfold.evoformer.confidence.scores import (
    chain_confidence,
    plddt,
    predicted_aligned_error,
    predicted_tm_score,
)

__all__ = ["chain_confidence", "plddt", "predicted_aligned_error", "predicted_tm_score"]
