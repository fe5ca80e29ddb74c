"""Training sets: entries, samples with their labels, and the cache of parsed files."""
