"""Fold thousands of targets with workers on this machine or on a Ray cluster."""
