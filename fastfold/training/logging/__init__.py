"""Where a run's numbers go: terminal, files, TensorBoard; and which samples it drew."""
