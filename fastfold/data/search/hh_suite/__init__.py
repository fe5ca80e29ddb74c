"""Searches by programs of HH-suite."""
