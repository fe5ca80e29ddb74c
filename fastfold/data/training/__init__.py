"""Training sets: entries, samples with labels, and the cache of parsed files."""
