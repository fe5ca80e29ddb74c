"""Search for the fastest plan: a program's counted work and messages, and their cost on a machine."""
