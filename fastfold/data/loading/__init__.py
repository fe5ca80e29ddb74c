"""Samples made by worker processes, in an order that can be continued."""
