"""Helpers without knowledge of proteins or networks: files, units, devices, hashes."""
