"""Search sequence databases for alignments of targets, and keep the results."""
