"""Commands that fetch or search the inputs of folds: databases, alignments and weights."""
