"""Features of the network, computed from raw features of monomers and complexes."""
