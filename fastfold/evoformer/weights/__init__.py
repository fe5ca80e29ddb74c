"""Weights files: AlphaFold's, OpenFold's and FastFold's own, read, written, and told apart."""
