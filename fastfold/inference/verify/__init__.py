"""``fastfold verify``: recorded runs of the official program, repeated and compared."""

from fastfold.inference.verify.records import recorded_runs, verify

__all__ = ["recorded_runs", "verify"]
