"""What only CPUs need: products in fewer bits, blocks for threads, and the library of matrix products."""
