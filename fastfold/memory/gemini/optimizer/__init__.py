"""Optimizer of a managed model: its states, its step in chunks, and its step during the backward pass."""
