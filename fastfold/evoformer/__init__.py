"""The AlphaFold 2 network, one file per idea."""
