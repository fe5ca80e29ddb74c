"""Places for tensors: a device, one that is simulated, and the tiers behind it."""
