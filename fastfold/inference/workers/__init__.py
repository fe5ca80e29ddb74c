"""Many targets by several workers, on this machine or on a Ray cluster."""
