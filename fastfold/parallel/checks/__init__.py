"""Checks of a plan: it matches the model, the ranks agree, and parts compute what the whole does."""
