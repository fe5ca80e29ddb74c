"""From representations to atoms (supplement, section 1.8)."""
