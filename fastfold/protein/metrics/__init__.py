"""Scores of structures: how alike two are (lDDT, TM-score, GDT, RMSD), atoms that clash, and interfaces."""
