"""Fold one target: features, network, prediction."""
