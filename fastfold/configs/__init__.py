"""Hydra's configuration files of ``fastfold train``."""
