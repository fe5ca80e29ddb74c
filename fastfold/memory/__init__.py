"""Memory of big models on small devices: general, for any ``nn.Module``."""
