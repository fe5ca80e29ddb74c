"""Storage of any module's weights in 8 bits, for inference on a CPU."""
