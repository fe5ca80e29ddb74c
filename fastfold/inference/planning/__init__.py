"""Memory and time of a fold's operators, and a plan within a budget."""
