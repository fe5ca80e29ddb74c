"""Reading once more what a disk or a network failed to give."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastfold.errors import InputError

WAITS_S = (1.0, 4.0)
"""Seconds before each further try."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def retry_io(function: Callable[[], T], waits_s: Sequence[float] = WAITS_S) -> T:
    """What a function returns, which is called again if a file could not be read for a reason that may pass.

    Args:
        function: Called without arguments.
        waits_s: Seconds to wait before each further try.

    Raises:
        InputError: A file cannot be used, or not read in any of the tries.
        OSError: The same of files that are read in passing.
    """
    for wait in waits_s:
        try:
            return function()
        except (InputError, OSError) as error:
            if isinstance(error, InputError) and not error.temporary:
                raise
            _log.warning("%s; it is read again in %g s", error, wait)
            time.sleep(wait)
    return function()
