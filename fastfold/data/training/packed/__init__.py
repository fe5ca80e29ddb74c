"""Training sets in one file: an index of entries, or preprocessed sets, read through memory maps."""
