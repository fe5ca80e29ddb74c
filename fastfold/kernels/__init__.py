"""General operators: a plain PyTorch definition of each is its specification."""
