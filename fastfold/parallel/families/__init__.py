"""Layers, stages and attention of a model that does not name them: ``"auto"`` of :func:`fastfold.parallel.parallelize`.

Models of transformers are the common case. Nothing here depends on that library: a model is read by its modules, by the
``tp_plan`` that it may have, and by one call without data.
"""
