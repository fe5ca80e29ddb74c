"""What is to be folded, in all forms that ``fastfold infer`` takes."""
