"""The bias of attention from the pair representation."""
