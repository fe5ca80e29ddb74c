"""What a fold takes: memory and time of its operators, and a plan within a budget."""
