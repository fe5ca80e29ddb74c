"""Prepare samples in worker processes, in a resumable order."""
