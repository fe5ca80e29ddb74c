"""Checks of ranks that work together: on a plan and its model, on parts against the plain model, and on agreement.

Before any message: ``plan``, ``plain_layers``, ``units``, and ``stages``, which traces a pipeline. At first calls:
``cut_layers`` and ``sequence``, which run a module in both ways. At every call and step: ``agreement``.
"""
