"""Alignments as ColabFold makes them: by a server of its kind, or by MMseqs2 on databases of its layout."""
