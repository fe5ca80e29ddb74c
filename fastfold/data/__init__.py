"""From FASTA and alignments to the features of the network."""
