"""Ensembles: many samples of one target, and their analysis."""
