"""Sequence parallelism: ring attention, and modules that run on this rank's part of a sequence."""
