"""Ranks that hold parts of one sequence: ring attention, and modules that run on their part."""
