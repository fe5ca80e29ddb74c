"""Fold one target: its features, a network, its prediction."""
