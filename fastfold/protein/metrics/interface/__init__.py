"""Scores of the interfaces between the chains of a prediction."""

from fastfold.protein.metrics.interface.pair_scores import (
    DirectedScores,
    InterfaceContacts,
    directed_scores,
    interface_contacts,
)
from fastfold.protein.metrics.interface.scores import ChainConfidence, interface_scores, without_scores

__all__ = [
    "ChainConfidence",
    "DirectedScores",
    "InterfaceContacts",
    "directed_scores",
    "interface_contacts",
    "interface_scores",
    "without_scores",
]
