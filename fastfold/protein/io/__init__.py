"""Structure files: readers of PDB and mmCIF, writers of PDB and ModelCIF."""
