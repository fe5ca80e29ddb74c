"""Layer normalisation, and a linear layer after it."""
