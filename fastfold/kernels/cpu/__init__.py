"""Parts for CPUs only: products in fewer bits, blocks for threads, and the choice of the matrix product library."""
