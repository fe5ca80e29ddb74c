"""Training: the trainer and what belongs to it."""
