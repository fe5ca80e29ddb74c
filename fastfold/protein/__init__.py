"""Residues, rigid frames, torsions, and structures; files of these in ``io``, comparisons in ``metrics``."""
