"""Scores of the interfaces between the chains of a prediction."""

from fastfold.protein.metrics.interface.contacts import InterfaceContacts, interface_contacts
from fastfold.protein.metrics.interface.ipsae import DirectedScores, directed_scores
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
