"""``fastfold verify``: recorded runs of the official program, repeated and compared."""

from fastfold.inference.verify.records import recorded_runs, verify
from fastfold.inference.verify.shipped import RECORD

__all__ = ["RECORD", "recorded_runs", "verify"]
