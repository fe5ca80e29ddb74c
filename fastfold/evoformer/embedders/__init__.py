"""From features, the last cycle and templates to the first MSA and pair representations."""
