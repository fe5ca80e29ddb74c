"""Which chunk stays where and when, within a budget."""
