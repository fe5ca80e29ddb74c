"""``fastfold verify``: repeat recorded runs of AlphaFold and compare the results."""

from fastfold.products.verify.data import MissingInputError
from fastfold.products.verify.records import RECORD, recorded_runs, verify

__all__ = ["RECORD", "MissingInputError", "recorded_runs", "verify"]
