"""Training sets in one file: an index of entries, or whole preprocessed sets, read through memory maps."""
