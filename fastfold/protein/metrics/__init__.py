"""Scores of structures: similarity (lDDT, TM-score, GDT, RMSD), clashes and interfaces."""
