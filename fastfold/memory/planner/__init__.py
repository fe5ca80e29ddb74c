"""Planner of chunk residency within a budget."""
