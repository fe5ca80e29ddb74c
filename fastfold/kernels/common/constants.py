"""Constants shared by definitions and kernels of several operators."""

from __future__ import annotations

MASKED_LOGIT = -1e9
"""AlphaFold's substitute for minus infinity: if all keys of a row are masked, they have equal weights, and attention
returns the mean of their values."""

MAX_HEADS = 16
"""Maximum number of heads of a pair bias: 32 heads with 128 channels of float32 exceed a program's registers."""
