"""Training losses (supplement, section 1.9), one file per idea; :func:`alphafold_loss` sums them."""

from fastfold.evoformer.losses.total import alphafold_loss

__all__ = ["alphafold_loss"]
