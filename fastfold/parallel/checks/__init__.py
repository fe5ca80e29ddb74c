"""Checks of a plan: it matches the model, the ranks agree, and parts compute the same as the whole."""
