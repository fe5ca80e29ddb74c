"""Fold for a lab over HTTP: a durable queue, workers of this machine or a Ray cluster, and a client.

The client's names are loaded on first use, so that they need neither PyTorch nor the packages of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.products.serve.client import Client, RefusedError

__all__ = ["Client", "RefusedError"]

__getattr__, __dir__ = lazy_names(__name__)
