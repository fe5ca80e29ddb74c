"""Errors and times of variants of a computation, for parts of ``whole_folds.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.gpu.timing import Line, in_short

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.kernels.measuring import Meter, Timing

MAX_ERROR = 6e-3
"""Relative error between two results in bf16 that are both within 4e-3 of the exact one."""


class Comparison:
    """Variants of a computation; the first one is right."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._count = 0
        self._expected: list[Tensor] | None = None

    def measure(self, call: Callable[[], Sequence[Tensor]]) -> Line:
        """Return the error and times of the next variant.

        A variant that fails, or that differs from the first one, has an ``error`` and is not timed.
        """
        import torch

        self._count += 1
        try:
            results = [x.float() for x in call()]
            if self._count == 1:
                self._expected = results
            if self._expected is None:
                return {"error": "the first variant, with which others are compared, failed"}
            pairs = zip(results, self._expected, strict=True)
            line: Line = {
                "relative_error": float(torch.stack([(x - y).norm() / y.norm() for x, y in pairs]).max())
            }
            if not line["relative_error"] < MAX_ERROR:
                return line | {"error": f"differs from the first variant by more than {MAX_ERROR}"}
            return line | times(self._meter.time(lambda inputs: call(), [{}]))
        except Exception as error:
            return {"error": in_short(error)}


def times(timing: Timing) -> Line:
    """Return the items of a line for the times on device and host."""
    return {"device_ms": round(timing.milliseconds, 4), "host_ms": round(timing.host_milliseconds, 4)}
