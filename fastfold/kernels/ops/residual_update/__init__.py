"""A residual with bias and dropout added."""
