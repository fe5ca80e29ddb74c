"""One axis of a pair tensor, or both, cut over ranks: shards, grids, and products over them."""
