"""Bounds of settings, declared with the fields of their dataclasses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from omegaconf import MISSING as NOT_SET

from fastfold.errors import ConfigError

_KEY = "bounds"


@dataclass(frozen=True)
class Bounds:
    """Allowed values of a setting; null too, if its type allows it.

    ``above`` and ``below`` are exclusive.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Check a value against the bounds.

        Raises:
            ConfigError: The value is not allowed; the message names the setting and its bounds.
        """
        if value is None or value == NOT_SET:
            return
        if self.choices:
            if value not in self.choices:
                raise ConfigError(f"{name} must be one of {', '.join(self.choices)}, not {value!r}")
            return
        assert isinstance(value, (int, float))
        limits = (
            (self.least, "at least", lambda limit: value >= limit),
            (self.above, "above", lambda limit: value > limit),
            (self.most, "at most", lambda limit: value <= limit),
            (self.below, "below", lambda limit: value < limit),
        )
        stated = [(limit, word, holds) for limit, word, holds in limits if limit is not None]
        if not (math.isfinite(value) and all(holds(limit) for limit, _, holds in stated)):
            words = [] if math.isfinite(value) else ["finite"]
            allowed = " and ".join([*words, *(f"{word} {limit:g}" for limit, word, _ in stated)])
            raise ConfigError(f"{name} must be {allowed}, got {value}")


def bounded(default: Any = MISSING, **bounds: Any) -> Any:
    """Return a dataclass field with bounds.

    The bounds are attributes of :class:`Bounds`.
    """
    return field(default=default, metadata={_KEY: Bounds(**bounds)})


def share(default: float | None) -> Any:
    """Return a dataclass field for a share from 0 to 1."""
    return bounded(default, least=0.0, most=1.0)


def check_bounds(group: str, schema: Any, values: Mapping[str, object]) -> None:
    """Check all settings of a group against their bounds; no text may be empty.

    An empty path, such as that of an unset variable of the shell, would mean the current folder.

    Unset settings (``???``) are not checked; the schema is a dataclass with :func:`bounded` fields.

    Raises:
        ConfigError: A setting is outside of its bounds, or empty.
    """
    for one in fields(schema):
        value = values[one.name]
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"{group}.{one.name} is empty; give a value, or leave the setting out")
        if _KEY in one.metadata:
            one.metadata[_KEY].check(f"{group}.{one.name}", value)
