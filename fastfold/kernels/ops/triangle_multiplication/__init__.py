"""Triangle multiplication, and its two halves for those who contract in their own way."""
