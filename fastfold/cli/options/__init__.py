"""Options that several commands share, and hints for wrong ones."""
