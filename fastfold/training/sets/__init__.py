"""What a run trains and validates on: found in folders, kept in an index, or packed into one file."""
