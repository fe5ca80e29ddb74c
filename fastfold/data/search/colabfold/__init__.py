"""Alignments as in ColabFold: from an MSA server, or by MMseqs2 on databases of its layout."""
