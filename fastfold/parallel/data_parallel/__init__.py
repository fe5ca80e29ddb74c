"""Data parallelism: ZeRO, sharded parameters and optimizers for large batches."""
