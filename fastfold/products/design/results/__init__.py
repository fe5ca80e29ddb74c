"""Results of designs: folds, filters, sequences of another program, and table."""
