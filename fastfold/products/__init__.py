"""Products that are built on folding, a folder each; deleting one leaves the others working."""
