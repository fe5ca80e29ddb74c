"""Embed features, the previous cycle and templates into the initial MSA and pair representations."""
