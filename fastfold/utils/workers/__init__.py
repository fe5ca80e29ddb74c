"""Worker processes: a pool that survives failures of tasks, and the loop of a worker."""
