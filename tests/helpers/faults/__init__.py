"""Faults of disks, locks, processes and connections, for commands that must survive them."""
