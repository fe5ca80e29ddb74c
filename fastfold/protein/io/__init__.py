"""Structure files: PDB and mmCIF read, PDB and ModelCIF written."""
