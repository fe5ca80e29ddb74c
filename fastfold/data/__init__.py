"""Data pipeline: from sequences and alignments to the features of the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.data.features.pipeline import featurize
    from fastfold.data.msa.find import read_msa
    from fastfold.data.msa.msa import Msa
    from fastfold.data.queries.fasta import read_fasta
    from fastfold.data.training.dataset import open_dataset

__all__ = ["Msa", "featurize", "open_dataset", "read_fasta", "read_msa"]

__getattr__, __dir__ = lazy_names(__name__)
