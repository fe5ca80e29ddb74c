"""Triangle multiplication, and its two halves for callers with a contraction of their own."""
