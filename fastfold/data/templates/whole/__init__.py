"""Templates of whole structures, with all chains in one frame."""
