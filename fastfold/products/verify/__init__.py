"""``fastfold verify``: repeat recorded runs of AlphaFold and compare the results.

The names are loaded on first use, so that the help of the command loads no PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.products.verify.data import MissingInputError
    from fastfold.products.verify.records import RECORD, recorded_runs, verify

__all__ = ["RECORD", "MissingInputError", "recorded_runs", "verify"]

__getattr__, __dir__ = lazy_names(__name__)
