"""Numerical properties of other programs that results depend on."""
