"""Inference: from sequences to written structures."""
