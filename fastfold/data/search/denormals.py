"""Flush denormal numbers to zero, as HMMER's own programs do.

HMMER's programs set the processor's vector unit to this mode at the start. ``pyhmmer`` does not, because the mode
applies to everything in the thread. Without it, forward and backward matrices full of denormal numbers slow a search
with many hits down. Hits, scores and alignments are equal in both modes.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Iterator

_FLUSH_TO_ZERO = 1 << 15
_DENORMALS_ARE_ZERO = 1 << 6


class _Environment(ctypes.Structure):
    """``fenv_t`` of the C libraries of Linux on x86-64."""

    _fields_ = (("x87", ctypes.c_uint8 * 28), ("mxcsr", ctypes.c_uint32))


def _mathematics() -> ctypes.CDLL:
    """Return the library with ``fegetenv``: the C library in musl, a separate file in glibc."""
    try:
        return ctypes.CDLL("libm.so.6")
    except OSError:
        return ctypes.CDLL(None)


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Flush denormal numbers to zero in this thread inside, if the processor supports it.

    On other systems than Linux on x86-64 nothing changes.
    """
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        yield
        return
    library = _mathematics()
    before, flushed = _Environment(), _Environment()
    library.fegetenv(ctypes.byref(before))
    library.fegetenv(ctypes.byref(flushed))
    flushed.mxcsr |= _FLUSH_TO_ZERO | _DENORMALS_ARE_ZERO
    library.fesetenv(ctypes.byref(flushed))
    try:
        yield
    finally:
        library.fesetenv(ctypes.byref(before))
