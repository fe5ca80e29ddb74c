"""Training and validation sets of a run: scanned from folders, kept in an index, or packed into one file."""
