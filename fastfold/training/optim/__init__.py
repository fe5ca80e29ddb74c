"""Parts of an optimisation step: accumulation, optimizer, learning rate and moving average."""
