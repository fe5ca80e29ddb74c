"""Numbers that definitions and kernels of several operators share."""

from __future__ import annotations

MASKED_LOGIT = -1e9
"""AlphaFold's stand-in for minus infinity: a row whose keys are all masked has the same weight everywhere,
so attention makes it the mean of its values."""

MAX_HEADS = 16
"""Heads of a pair bias at most: with 32 and 128 channels of float32 the registers of a program do not suffice."""
