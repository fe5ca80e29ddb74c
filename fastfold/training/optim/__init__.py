"""What happens to gradients and parameters in a step: accumulation, optimizer, learning rate, moving average."""
