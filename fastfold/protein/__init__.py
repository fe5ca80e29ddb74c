"""Residues, rigid frames, torsions, and structure files."""
