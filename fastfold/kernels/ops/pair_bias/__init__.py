"""Bias of attention from the pair representation."""
