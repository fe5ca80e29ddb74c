"""The runner: from sequences to written structures."""
