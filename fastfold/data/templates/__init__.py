"""Templates: from hits of a search, or structures of the user, to the features of the network."""
