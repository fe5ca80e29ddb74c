"""Predictions in Python sessions and notebooks: read back, shown, listed, and as objects of other libraries."""
