"""The optimizer of a managed model: what it keeps, its step chunk by chunk, and its step beside the backward pass."""
