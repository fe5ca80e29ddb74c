"""Ranks with data of their own: ZeRO, sharded parameters, optimizers of large batches."""
