"""Export of networks as programs of PyTorch's operators."""
