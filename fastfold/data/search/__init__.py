"""Searching sequence databases for the alignments of targets, and keeping what was found."""
