"""Transition: two linear layers with a ReLU between them."""
