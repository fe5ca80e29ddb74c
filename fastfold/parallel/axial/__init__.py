"""Tensors with one or two axes cut over ranks: shards, grids, and matrix products over them."""
