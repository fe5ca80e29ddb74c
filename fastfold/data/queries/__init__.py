"""Queries of ``fastfold infer`` in all formats."""
