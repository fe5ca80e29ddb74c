"""Results of designs: folds, filters, sequences of another program, table and film."""
