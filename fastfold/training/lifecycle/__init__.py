"""Start, interruption and continuation of a run."""
