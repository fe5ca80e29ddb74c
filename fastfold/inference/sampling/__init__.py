"""Samples of a target: predictions from changed alignments, or with dropout."""
