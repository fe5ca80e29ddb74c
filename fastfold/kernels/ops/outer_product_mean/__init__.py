"""Outer product mean of two projections."""
