"""Output of folds: structures, scores, plots, and records of finished targets."""
