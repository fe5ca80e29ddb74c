"""A model whose parameters, gradients and activations move between device, host and disk."""
