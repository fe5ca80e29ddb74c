"""From raw features to those that the network takes, of monomers and of complexes."""
