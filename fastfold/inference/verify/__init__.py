"""``fastfold verify``: repeat recorded runs of AlphaFold and compare the results."""

from fastfold.inference.verify.recorded_array import MissingInputError
from fastfold.inference.verify.records import recorded_runs, verify
from fastfold.inference.verify.shipped import RECORD

__all__ = ["RECORD", "MissingInputError", "recorded_runs", "verify"]
