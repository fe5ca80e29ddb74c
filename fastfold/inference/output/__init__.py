"""What a fold leaves: structures, scores, plots, and the marker of finished targets."""
