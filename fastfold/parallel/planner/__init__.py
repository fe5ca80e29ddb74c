"""Which plan is the fastest: work and messages of the program, counted, and their cost on a machine."""
