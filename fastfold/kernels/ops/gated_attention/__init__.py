"""Gated attention: projections, attention, gate and output."""
