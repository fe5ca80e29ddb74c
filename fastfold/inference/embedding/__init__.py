"""Embeddings: representations of a target for other programs."""
