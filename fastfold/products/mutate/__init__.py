"""Fold point mutants of a target from one alignment, and compare them with the wild type."""
