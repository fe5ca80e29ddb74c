"""Structure module: atom positions from representations (supplement, section 1.8)."""
