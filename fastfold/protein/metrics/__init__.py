"""How alike two structures are: lDDT, TM-score, GDT, RMSD, and the atoms that clash."""
