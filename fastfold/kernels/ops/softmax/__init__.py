"""Softmax of scores with bias and mask."""
