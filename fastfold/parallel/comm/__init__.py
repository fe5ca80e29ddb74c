"""Groups of ranks, and what they send each other: differentiable, asynchronous, counted."""
