"""Multiple sequence alignments: their formats, and where they are found."""
