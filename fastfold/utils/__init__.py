"""Helpers that know nothing of proteins or networks: files, units, devices, hashes."""
