"""Gemini: management of a model's parameters, gradients and activations on device, host and disk."""
