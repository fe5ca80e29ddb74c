"""Embeddings: representations of targets for other programs."""
