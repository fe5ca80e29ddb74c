"""Import this to leave out ``fsync``: it waits for a disk, of which only a power cut would show anything.

A fold syncs twenty files and folders. Tests of what a disk answers put a function of their own in its place.
"""

import os


def _fsync(descriptor: int) -> None:
    os.fstat(descriptor)  # a descriptor that is closed is an error here too


os.fsync = _fsync  # type: ignore[assignment]
