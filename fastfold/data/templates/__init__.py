"""Templates: from hits of a search, or structures of the user, to features of the network."""
