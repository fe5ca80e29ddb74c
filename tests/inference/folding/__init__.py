"""Tests of ``fastfold.inference.folding``."""
