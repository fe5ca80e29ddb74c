"""Attention with bias and mask that never stores its matrix of scores."""
