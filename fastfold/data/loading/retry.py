"""Retry reads from a disk or a network."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastfold.errors import InputError

WAITS_S = (1.0, 4.0)  #: Seconds before each further try

T = TypeVar("T")

_log = logging.getLogger(__name__)


def retry_io(function: Callable[[], T], waits_s: Sequence[float] = WAITS_S) -> T:
    """Call a function, again if a file could not be read for a temporary reason.

    Raises:
        InputError: A file is invalid, or could not be read in any try.
        OSError: A file could not be read in any try.
    """
    for wait in waits_s:
        try:
            return function()
        except (InputError, OSError) as error:
            if isinstance(error, InputError) and not error.temporary:
                raise
            _log.warning("%s; reading it again in %g s", error, wait)
            time.sleep(wait)
    return function()
