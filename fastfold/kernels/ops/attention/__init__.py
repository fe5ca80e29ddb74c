"""Attention with bias and mask, without its matrix of scores."""
