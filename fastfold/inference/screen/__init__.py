"""Thousands of targets: a scheduler hands them to workers, on this machine or on those of a Ray cluster."""
