"""``fastfold verify``: repeat recorded runs of AlphaFold and compare the results."""

from fastfold.inference.verify.data import MissingInputError
from fastfold.inference.verify.records import RECORD, recorded_runs, verify

__all__ = ["RECORD", "MissingInputError", "recorded_runs", "verify"]
