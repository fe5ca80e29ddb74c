"""Sequence and template databases that AlphaFold's scripts download: where they are published, and a copy on disk."""
