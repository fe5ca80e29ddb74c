"""Checkpoints of a run: storage, contents, and checks for completeness."""
