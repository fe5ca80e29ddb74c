"""Numbers, and amounts of memory and of time, in the notation of the command line."""

from __future__ import annotations

import re

from fastfold.errors import ConfigError
from fastfold.utils.foreign_text import plain_float

GIB = 1024**3  #: Bytes of a GiB

_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_number(text: str) -> float:
    """Parse a number such as ``0.5``, ``1e-4`` or ``inf``; raise ConfigError for any other text.

    Example:
        >>> from fastfold.utils.units import parse_number
        >>> parse_number("1e-4")
        0.0001
    """
    try:
        return plain_float(text)
    except ValueError:
        raise ConfigError(f"{text[:20]!r} is not a number") from None


def parse_bytes(text: str | int, *, none: bool = False) -> int:
    """Parse an amount of memory in bytes: ``"20GiB"``, ``"512 MB"``, ``"1.5g"`` or a plain number.

    ``KiB``, ``MiB``, ``GiB``, ``TiB`` count in 1024; ``kB``, ``MB``, ``GB``, ``TB`` in 1000; single letters in 1024.
    With ``none`` 0 is accepted. A text without a unit is at least 1 MiB, so that ``24`` is not read as 24 bytes.

    Raises:
        ConfigError: The text is not an amount of memory, has no unit, or 0 is not accepted.

    Example:
        >>> from fastfold.memory import parse_bytes
        >>> parse_bytes("20GiB"), parse_bytes("512 MB"), parse_bytes("1.5k")
        (21474836480, 512000000, 1536)
    """
    if isinstance(text, int):
        amount = text
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([KMGT]?)(I?B)?\s*", text.upper())
        if match is None:
            raise ConfigError(
                f"{text!r} is not an amount of memory; write for example 20GiB, 512MiB or 1000000"
            )
        number, letter, ending = match.groups()
        base = 1000 if letter and ending == "B" else 1024
        amount = int(float(number) * base ** (_UNITS[letter] if letter else 0))
        if not letter and not ending and 0 < amount < base**2:
            raise ConfigError(
                f"{text!r} bytes are too few for a budget; write the unit, for example {number}GiB"
            )
    if amount < 0 or (amount == 0 and not none):
        raise ConfigError(f"a memory budget of {text!r} leaves nothing to work with; write for example 20GiB")
    return amount


def parse_duration(text: str) -> float:
    """Parse a duration in seconds: ``"90s"``, ``"15m"``, ``"1.5h"``, ``"2d"``, ``"1:30:00"`` or a plain number.

    Raises:
        ConfigError: The text is not a duration, or zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smhd]?)\s*", text.lower(), re.ASCII)
    parts = re.fullmatch(r"\s*(?:(\d+):)?(\d{1,2}):(\d{2})\s*", text, re.ASCII)
    if match is not None:
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    elif parts is not None:
        seconds = float(int(parts[1] or 0) * 3600 + int(parts[2]) * 60 + int(parts[3]))
    else:
        raise ConfigError(f"{text[:40]!r} is not a length of time; write for example 90s, 15m, 2h or 1:30:00")
    if seconds <= 0:
        raise ConfigError(f"a time of {text!r} leaves nothing to work in; write for example 90s, 15m or 2h")
    return seconds


def clock(seconds: float) -> str:
    """Format seconds as ``1:02:03`` or ``2:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
