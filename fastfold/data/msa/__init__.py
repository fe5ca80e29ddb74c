"""Multiple sequence alignments: formats and files."""
